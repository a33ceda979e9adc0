"""What is checked of a patched model on a device: each check gives what was found there, and what a reference says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_posenc.attention.blockwise import SIZES
from tests.kits.gpu.models import DECODER, tokens

_PADS = 7
#: Tokens that are decoded one by one, behind two longer pieces.
_STEPS = 6

Found = tuple[Tensor, Tensor]


class SkippedError(Exception):
    """A check that means nothing here; the message says why."""


@dataclass(frozen=True)
class Bench:
    """Two copies of one model.

    Args:
        model: on the device, in the dtype and with the backend that are checked.
        reference: on the CPU, in float64, with eager attention, of the same weights in the same dtype.
        length: tokens of a short input.
        long: tokens of a long one, which kernels take in blocks.
    """

    kind: str
    model: Any
    reference: Any
    device: str
    compiler: str
    length: int
    long: int

    def found(self, model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
        """Logits `(batch, length, vocabulary)`, on the CPU in float64."""
        given = {"input_ids": input_ids, **self.uncached, **arguments}
        moved = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in given.items()}
        with torch.no_grad():
            return model(**moved).logits.double().cpu()

    @property
    def uncached(self) -> dict[str, Any]:
        """For a forward pass of the whole input."""
        return {"use_cache": False} if self.kind == DECODER else {}

    def wanted(self, input_ids: Tensor) -> Tensor:
        """Logits of the reference."""
        with torch.no_grad():
            return self.reference(input_ids=input_ids, **self.uncached).logits

    def static_cache(self) -> StaticCache:
        """An empty cache of a fixed size."""
        return StaticCache(config=self.model.config, max_cache_len=self.length + 8)

    def recorded(self) -> Any:
        """The model, recorded as a CUDA graph."""
        if self.device != "cuda":
            raise SkippedError("CUDA graphs need a GPU")
        return torch.compile(self.model, mode="reduce-overhead")


def _forward(bench: Bench, ids: Tensor) -> Found:
    return bench.found(bench.model, ids), bench.wanted(ids)


def _left_padding(bench: Bench) -> Found:
    """Tokens behind padding are read as without it."""
    ids = tokens(bench.length)
    padded = torch.cat((torch.zeros(2, _PADS, dtype=ids.dtype), ids), dim=1)
    mask = (torch.arange(padded.shape[1]) >= _PADS).long().expand(2, -1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = bench.found(bench.model, padded, attention_mask=mask, position_ids=positions)
    return logits[:, _PADS:], bench.wanted(ids)


def _gradients(bench: Bench) -> Found:
    """Gradients of all weights, one vector for each, of a random function of the logits.

    Not in training mode, in which randomised positions differ between the copies.
    """
    ids = tokens(bench.length)
    weights = torch.randn(1, bench.length, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    vectors = []
    for model in (bench.model, bench.reference):
        device = next(model.parameters()).device
        logits = model(input_ids=ids.to(device), **bench.uncached).logits
        (logits.double() * weights.to(device)).mean().backward()
        named = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        vectors.append({name: gradient.double().cpu().flatten() for name, gradient in named.items()})
        model.zero_grad(set_to_none=True)
    computed, wanted = vectors
    if computed.keys() != wanted.keys():
        raise AssertionError(f"other weights have gradients: {sorted(computed.keys() ^ wanted.keys())}")
    # Some gradients are zero but for rounding: softmax does not see the bias of a key.
    least = 1e-2 * max(float(gradient.norm()) for gradient in wanted.values())
    errors = torch.stack(
        [(computed[name] - gradient).norm() / max(float(gradient.norm()), least) for name, gradient in wanted.items()]
    )
    # This treats each weight as a token with a vector of length 1.
    return (1 + errors).unsqueeze(-1), torch.ones(len(errors), 1, dtype=torch.float64)


def _gradients_in_blocks(bench: Bench) -> Found:
    """Gradients by the kernels that long inputs take; short ones get a matrix instead."""
    divided = SIZES[bench.device == "cpu"]._replace(short_pairs=0, shared_numbers=0, distance_rows=64, backward_rows=64)
    with mock.patch.dict(SIZES, {bench.device == "cpu": divided}):
        return _gradients(bench)


def _compiled(bench: Bench) -> Found:
    ids = tokens(bench.length)
    return bench.found(torch.compile(bench.model, backend=bench.compiler), ids), bench.wanted(ids)


def _cuda_graphs(bench: Bench) -> Found:
    """A forward pass that is recorded as a CUDA graph and replayed on other tokens."""
    model, ids = bench.recorded(), tokens(bench.length)
    for shift in (1, 2, 0):
        # The last one replays what the first ones recorded.
        torch.compiler.cudagraph_mark_step_begin()
        logits = bench.found(model, ids.roll(shift, dims=1))
    return logits, bench.wanted(ids)


def _decoded(bench: Bench, cache: Any, model: Any) -> Found:
    """A long piece, a short one, and single tokens, the latter by `model`, as one forward pass reads them."""
    ids = tokens(bench.length)
    long, short, singles = ids.split([bench.length - _STEPS - 5, 5, _STEPS], dim=1)
    logits = []
    for reader, piece in (
        (bench.model, long),
        (bench.model, short),
        *((model, token) for token in singles.split(1, 1)),
    ):
        torch.compiler.cudagraph_mark_step_begin()
        logits.append(bench.found(reader, piece, past_key_values=cache, use_cache=True))
    return torch.cat(logits, dim=1), bench.wanted(ids)


CHECKS: dict[str, Callable[[Bench], Found]] = {
    "forward": lambda bench: _forward(bench, tokens(bench.length)),
    "left_padding": _left_padding,
    "dynamic_cache": lambda bench: _decoded(bench, DynamicCache(config=bench.model.config), bench.model),
    "static_cache": lambda bench: _decoded(bench, bench.static_cache(), bench.model),
    "gradients": _gradients,
    "gradients_in_blocks": _gradients_in_blocks,
    "long_forward": lambda bench: _forward(bench, tokens(bench.long, batch=1)),
    "compiled": _compiled,
    "cuda_graphs": _cuda_graphs,
    # As `generate` does it.
    "cuda_graphs_static_cache": lambda bench: _decoded(bench, bench.static_cache(), bench.recorded()),
}

#: Checks of models with a cache.
NEED_A_CACHE = ("dynamic_cache", "static_cache", "cuda_graphs_static_cache")


def largest_error(computed: Tensor, wanted: Tensor) -> float:
    """The largest error of one token's vector over the mean length of these vectors; NaN if there is one."""
    errors = (computed - wanted).norm(dim=-1)
    if bool(errors.isnan().any()):
        return float("nan")
    return float(errors.max() / wanted.norm(dim=-1).mean())
