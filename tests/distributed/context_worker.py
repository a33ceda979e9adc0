"""One of two processes that share the tokens of a sequence: how far each scheme is from one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache

from hf_posenc import AlibiConfig, ComposedConfig, UnsupportedError, patch_model
from hf_posenc.schemes import DualChunkConfig, RandomizedConfig, SelfExtendConfig, SSMaxConfig
from tests.distributed.processes import full, largest
from tests.distributed.sharded_worker import shared
from tests.matrix.running import distance, patched, tokens
from tests.models import tiny

LENGTH = 16
#: Act before sdpa. The exchange of keys is torch's, which it has for accelerators only.
MAPS = ("rope", "sinusoidal", "pope", "ssmax")
#: One of each form of a bias, and what each way may change.
QUICK = {
    "balanced": ("alibi", "t5", "kerple", "forget_gate", "shaw", "cope", "self_extend", "scaled"),
    "in order": ("alibi", "t5", "forget_gate"),
    "checkpointed": ("alibi", "t5", "forget_gate", "shaw"),
    "jumps": ("alibi", "t5", "forget_gate", "shaw"),
    "padded": ("alibi", "t5"),
    "evaluated": ("alibi", "t5", "forget_gate", "self_extend"),
    "fsdp2": ("alibi", "t5", "forget_gate"),
    "long": ("alibi", "t5", "shaw"),
    "encoder": ("alibi", "t5", "shaw"),
}
#: Every scheme with a bias.
EVERY = (
    *QUICK["balanced"], "fire", "sandwich", "tisa", "disentangled", "wavelet", "transformer_xl", "grape", "grape_ap",
    "low_rank_relative", "tupe", "dual_chunk", "rerope", "attention_sinks",
)  # fmt: skip
#: What takes long.
SLOW = dict.fromkeys(("balanced", "checkpointed", "jumps"), EVERY) | {"compiled": ("alibi", "t5")}
OPTIONS: dict[str, Any] = {
    "self_extend": SelfExtendConfig(group=2, window=3),
    "dual_chunk": DualChunkConfig(chunk_size=6, local_size=2),
    "scaled": ComposedConfig((AlibiConfig(), SSMaxConfig())),
    "randomized": RandomizedConfig(AlibiConfig(), max_position=64),
}


def ring(original: Any, positions: Tensor) -> Any:
    """What torch's ring of processes computes, which it has for accelerators only: every query reads all keys."""

    def gathered(tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, -2)

    def attend(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        at = gathered(positions[0].unsqueeze(-1)).squeeze(-1)
        seen = positions[0].unsqueeze(-1) >= at
        kwargs |= {"attn_mask": seen, "is_causal": False}
        return original(query, gathered(key), gathered(value), **kwargs)

    return attend


@torch.no_grad()
def mapped(scheme: Any) -> float:
    """Two processes with half of the tokens each, whose keys are exchanged without a bias."""
    model = patched("llama_gqa", scheme)
    model.set_attn_implementation("sdpa")
    ids = tokens(2, LENGTH)
    positions = torch.arange(LENGTH).repeat(2, 1)
    expected = model(ids).logits
    attend = torch.nn.functional.scaled_dot_product_attention
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        replaced = torch.nn.functional.scaled_dot_product_attention
        assert replaced is not attend
        torch.nn.functional.scaled_dot_product_attention = ring(attend, positions.clone())
        try:
            found = model(ids, position_ids=positions).logits
        finally:
            torch.nn.functional.scaled_dot_product_attention = replaced
        own = positions.clone()
    return distance(found, expected.gather(1, own.unsqueeze(-1).expand(-1, -1, expected.shape[-1])))


def split(*buffers: Tensor, balanced: bool = True) -> Any:
    """The context in which each process has half of the tokens."""
    _cp_options.enable_load_balance = balanced
    return context_parallel(init_device_mesh("cpu", (2,)), buffers=[*buffers], buffer_seq_dims=[1] * len(buffers))


def trained(scheme: str, way: str) -> dict[str, float]:
    """Loss and gradients of two processes, and those of one."""
    causal = way != "encoder"
    length = 640 if way == "long" else LENGTH
    model = patched("llama_gqa" if causal else "bert", OPTIONS.get(scheme, scheme), attn_implementation="sdpa").train()
    run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    whole = copy.deepcopy(model)
    if way == "fsdp2":
        # As accelerate does: the processes that share a sequence share the weights too.
        run = shared(model, way)
    ids = tokens(2, length)
    labels = pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.arange(length).repeat(2, 1)
    if way == "jumps":
        positions[:, 5:] += 3
        positions[1, 10:] += 20
    given = {"position_ids": positions}
    if way == "padded":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, 11:] = 0
        labels[1, 10:] = -100

    def loss(of: Any) -> Tensor:
        logits = of(ids, **given).logits.float()
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * length)

    torch.set_grad_enabled(way != "evaluated")
    expected = loss(whole)
    if way == "evaluated":
        # After a call without far pairs, the next ones may only rotate. The processes must not decide that apart.
        run(ids[:, :2])
    if expected.requires_grad:
        expected.backward()
    if way == "compiled":
        # A graph of one process, for the lengths that follow.
        run(ids[:, ::2].contiguous(), position_ids=positions[:, : length // 2].contiguous())
    with split(ids, labels, *given.values(), balanced=causal and way != "in order"):
        found = loss(run)
        if found.requires_grad:
            found.backward()
    torch.set_grad_enabled(True)
    found = found.detach()
    dist.all_reduce(found)
    expected_gradients, gradients = (
        {name: full(weight.grad) for name, weight in one.named_parameters() if weight.grad is not None}
        for one in (whole, model)
    )
    for name in gradients:
        if way == "fsdp2":
            gradients[name] = 2 * gradients[name]  # The mean of both.
        else:
            dist.all_reduce(gradients[name])
    share = largest(gradients, expected_gradients, small=1e-2)[0] if expected_gradients else 0.0
    return {"loss": abs(float(found - expected)), "gradients": share}


def refused(case: str) -> str:
    """The message of a call that cannot be computed."""
    scheme, _, what = case.partition(" ")
    name = {"windows": "mistral_sliding", "padded encoder": "bert", "scores": "gptj"}.get(what, "llama_gqa")
    options = {"attention_dropout": 0.1} if what == "dropout" else {}
    if what == "in cross-attention":
        model: Any = tiny("GPT2LMHeadModel", add_cross_attention=True)
        patch_model(model, "native", cross_attention=scheme)
    else:
        model = patched(name, OPTIONS.get(scheme, scheme), **options).train(what == "dropout" or scheme == "randomized")
    model.set_attn_implementation("eager" if what == "eager" else "sdpa")
    ids = tokens(2, LENGTH)
    positions = torch.arange(LENGTH).repeat(2, 1)
    mask = torch.ones_like(ids)
    given = {"position_ids": positions, "use_cache": False}
    if what == "packed":
        positions[:, 9:] -= 9
    if what in ("padded on the left", "padded encoder"):
        mask[1, slice(12, None) if "encoder" in what else slice(0, 3)] = 0
        given["attention_mask"] = mask
    if what == "own mask":
        given["attention_mask"] = torch.ones(2, 1, LENGTH // 2, LENGTH // 2, dtype=torch.bool)
    if what == "no positions":
        del given["position_ids"]
    if what == "in cross-attention":
        given["encoder_hidden_states"] = torch.zeros(2, 7, 32)
    cache = DynamicCache() if "cache" in what else None
    if cache is not None:
        given |= {"use_cache": True, "past_key_values": cache}
    try:
        with split(ids, positions, mask, balanced="encoder" not in what):
            model(ids, **given)
            if what == "second call with a cache":
                model(ids, **given)
        if what == "cache that is continued later":
            model(tokens(2, 1), past_key_values=cache, position_ids=torch.full((2, 1), LENGTH))
    except UnsupportedError as error:
        return str(error)
    return "computed"


#: What refuses each of them.
REFUSED = {
    "repo": "(RepoRotation), for which features of all tokens are needed",
    "normalized_integer": "depends on the length of the sequence (NormalizedEncoding)",
    "randomized": "it draws random positions, and each process would draw its own",
    "rope no positions": "the positions of the tokens of this process are unknown. Pass position_ids",
    "alibi no positions": "the positions of the tokens of this process are unknown. Pass position_ids",
    "rope eager": "this model uses 'eager'. Call model.set_attn_implementation('sdpa')",
    "rope in cross-attention": "(RotaryMap), and it is unknown whether the encoder's tokens are split too",
    "alibi in cross-attention": "(AlibiBias), and it is unknown whether the encoder's tokens are split too",
    "alibi packed": "Packed documents, and left padding without a mask, have positions that restart",
    "alibi padded on the left": "attention_mask hides tokens before real tokens. Pad rows on the right",
    "alibi padded encoder": "this layer is not causal, so padding",
    "alibi own mask": "attention_mask is not (batch, 8), one number for each token of this process",
    "alibi dropout": "dropout of attention weights",
    "alibi windows": "layers of the kind sliding_attention, whose masks would be those of a part of the tokens",
    "alibi second call with a cache": "this call continues a cache",
    "alibi cache that is continued later": "were not recorded",
}


def main(folder: Path, *, everything: bool) -> dict[str, Any]:
    """What this process finds.

    Args:
        everything: every scheme in several ways, and nothing else.
    """
    warnings.simplefilter("ignore")
    ways = SLOW if everything else QUICK
    found: dict[str, Any] = {"trained": {}}
    for way, schemes in ways.items():
        for scheme in schemes:
            found["trained"][f"{way} {scheme}"] = trained(scheme, way)
    if not everything:
        found["mapped"] = {scheme: mapped(scheme) for scheme in MAPS}
        found["refused"] = {case: refused(case) for case in REFUSED}
    return found
