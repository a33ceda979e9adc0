"""What is checked of a patched model on a device: each check gives what was found there, and what a reference says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from benchmarks.gpu.tiny_models import DECODER, tokens

#: Tokens of most checks: more than one block of 128, and no multiple of it.
LENGTH = 160
#: Of the long ones: several blocks of every back-end's kernels.
LONG = 2304
_PADS = 7
#: Tokens that are decoded one by one, behind two longer pieces.
_STEPS = 6


class SkippedError(Exception):
    """A check that means nothing here; the message says why."""


@dataclass(frozen=True)
class Bench:
    """Two copies of one model.

    Args:
        kind: `DECODER` or `ENCODER`.
        model: on the device, in the dtype and with the back-end that are checked.
        reference: on the CPU, in float64, with eager attention, of the same weights in the same dtype.
        device: "cuda" or "cpu".
        compiler: the back-end of `torch.compile`.
        length: tokens of a short input.
        long: tokens of a long one.
    """

    kind: str
    model: Any
    reference: Any
    device: str
    compiler: str = "inductor"
    length: int = LENGTH
    long: int = LONG

    def found(self, model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
        """Logits `(batch, length, vocabulary)`, on the CPU in float64."""
        given = {"input_ids": input_ids, **arguments}
        moved = {name: one.to(self.device) if isinstance(one, Tensor) else one for name, one in given.items()}
        return model(**moved).logits.double().cpu()

    @property
    def uncached(self) -> dict[str, Any]:
        """For a forward pass of the whole input."""
        return {"use_cache": False} if self.kind == DECODER else {}

    def wanted(self, input_ids: Tensor) -> Tensor:
        """Logits of the reference."""
        with torch.no_grad():
            return self.reference(input_ids=input_ids, **self.uncached).logits


Found = tuple[Tensor, Tensor]


def forward(bench: Bench) -> Found:
    """One forward pass."""
    ids = tokens(bench.length)
    with torch.no_grad():
        return bench.found(bench.model, ids, **bench.uncached), bench.wanted(ids)


def long_forward(bench: Bench) -> Found:
    """One forward pass over an input that kernels take in blocks."""
    ids = tokens(bench.long, batch=1)
    with torch.no_grad():
        return bench.found(bench.model, ids, **bench.uncached), bench.wanted(ids)


def left_padding(bench: Bench) -> Found:
    """A batch with padding in front of one row; real tokens are read as without it."""
    ids = tokens(bench.length)
    padded = torch.cat((torch.zeros(2, _PADS, dtype=ids.dtype), ids), dim=1)
    mask = (torch.arange(padded.shape[1]) >= _PADS).long().expand(2, -1)
    arguments = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        return bench.found(bench.model, padded, **arguments, **bench.uncached)[:, _PADS:], bench.wanted(ids)


def dynamic_cache(bench: Bench) -> Found:
    """Decoding in pieces and token by token is the full forward."""
    return _decoded(bench, DynamicCache(config=bench.model.config), bench.model)


def static_cache(bench: Bench) -> Found:
    """The same behind a cache of a fixed size."""
    return _decoded(bench, _static(bench), bench.model)


def gradients(bench: Bench) -> Found:
    """Gradients of all weights, one vector for each, of a random function of the logits.

    Not in training mode, where randomised positions would be other ones in each copy.
    """
    ids = tokens(bench.length)
    weights = torch.randn(1, bench.length, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    vectors = []
    for model in (bench.model, bench.reference):
        device = next(model.parameters()).device
        logits = model(input_ids=ids.to(device), **bench.uncached).logits
        (logits.double() * weights.to(device)).mean().backward()
        named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        vectors.append({name: gradient.double().cpu().flatten() for name, gradient in named.items()})
        model.zero_grad(set_to_none=True)
    found, wanted = vectors
    if found.keys() != wanted.keys():
        raise AssertionError(f"other weights have gradients: {sorted(found.keys() ^ wanted.keys())}")
    # Some gradients are zero but for rounding: softmax does not see the bias of a key.
    least = 1e-2 * max(float(one.norm()) for one in wanted.values())
    scales = {name: max(float(one.norm()), least) for name, one in wanted.items()}
    errors = torch.stack([(found[name] - one).norm() / scales[name] for name, one in wanted.items()])
    # As if each weight were a token whose vector has the length 1.
    return (1 + errors).unsqueeze(-1), torch.ones(len(errors), 1, dtype=torch.float64)


def compiled(bench: Bench) -> Found:
    """A forward pass through torch.compile."""
    ids = tokens(bench.length)
    model = torch.compile(bench.model, backend=bench.compiler)
    with torch.no_grad():
        return bench.found(model, ids, **bench.uncached), bench.wanted(ids)


def cuda_graphs(bench: Bench) -> Found:
    """A forward pass that is recorded as a CUDA graph and replayed on other tokens."""
    model = _recorded(bench)
    ids = tokens(bench.length)
    with torch.no_grad():
        for shift in (1, 2, 0):
            # The last one replays what the first ones recorded.
            torch.compiler.cudagraph_mark_step_begin()
            found = bench.found(model, ids.roll(shift, dims=1), **bench.uncached)
        return found, bench.wanted(ids)


def cuda_graphs_static_cache(bench: Bench) -> Found:
    """Decoding token by token with a CUDA graph behind a static cache, as `generate` does it."""
    return _decoded(bench, _static(bench), _recorded(bench))


def _recorded(bench: Bench) -> Any:
    if bench.device != "cuda":
        raise SkippedError("CUDA graphs need a GPU")
    return torch.compile(bench.model, mode="reduce-overhead")


def _static(bench: Bench) -> StaticCache:
    return StaticCache(config=bench.model.config, max_cache_len=bench.length + 8)


def _decoded(bench: Bench, cache: Any, model: Any) -> Found:
    """A long piece, a short one, and single tokens, the latter by `model`."""
    ids = tokens(bench.length)
    pieces = [ids[:, : bench.length - _STEPS - 5], ids[:, bench.length - _STEPS - 5 : bench.length - _STEPS]]
    found = []
    with torch.no_grad():
        for piece in pieces:
            found.append(bench.found(bench.model, piece, past_key_values=cache, use_cache=True))
        for token in ids[:, bench.length - _STEPS :].split(1, dim=1):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(bench.found(model, token, past_key_values=cache, use_cache=True))
    return torch.cat(found, dim=1), bench.wanted(ids)


CHECKS: dict[str, Callable[[Bench], Found]] = {
    "forward": forward,
    "left_padding": left_padding,
    "dynamic_cache": dynamic_cache,
    "static_cache": static_cache,
    "gradients": gradients,
    "long_forward": long_forward,
    "compiled": compiled,
    "cuda_graphs": cuda_graphs,
    "cuda_graphs_static_cache": cuda_graphs_static_cache,
}

#: Checks of models with a cache.
NEED_A_CACHE = ("dynamic_cache", "static_cache", "cuda_graphs_static_cache")


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """The largest error of one token's vector over the mean length of these vectors; NaN if there is one."""
    errors = (found - wanted).norm(dim=-1)
    if bool(errors.isnan().any()):
        return float("nan")
    return float(errors.max() / wanted.norm(dim=-1).mean())
