"""Schemes in T5's blocks of llama.cpp: a number for each head and bucket of distances, in every layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.parts import ModelParts, refuse_other_parts
from hf_posenc.export.gguf.t5_blocks import t5_form
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.schemes.bias.t5 import T5Bias
from hf_posenc.schemes.parts import DistanceBias

#: llama.cpp's last bucket starts at this distance, for any number of buckets.
_LAST = 128
#: A bias is compared at distances up to this one.
_FURTHEST = 8192
#: Numbers of buckets to try for a bias that does not have T5's: the most that still end at `_LAST` in a decoder, and in
#: an encoder, which has half of them for each direction.
_COUNTS = (32, 254, 508)


def buckets(parts: ModelParts) -> GgufForm:
    """Any bias that is a number for each of llama.cpp's buckets, such as T5's own; no bias is zero in all buckets."""
    refuse_other_parts(parts, "logit_bias")
    own = {layer.logit_bias.num_buckets for layer in _layers(parts) if isinstance(layer.logit_bias, T5Bias)}
    refusals = []
    for count in dict.fromkeys([*sorted(own), *_COUNTS]):
        try:
            tables = _tables(parts, count)
        except UnsupportedError as error:
            refusals.append(error)
            continue
        form = t5_form(parts)
        form.tensors.update(tables)
        form.metadata["attention.relative_buckets_count"] = count
        return form
    raise refusals[0]


def _layers(parts: ModelParts) -> Iterator[LayerEncoding]:
    return (layer for one in parts.stacks for layer in one.encoding.layers)


def _tables(parts: ModelParts, count: int) -> dict[str, Tensor]:
    """Tables of `(buckets, heads)`. Layers without one have that of the first."""
    found = {}
    for side, one in zip(("enc", "dec"), parts.stacks, strict=False):
        tables = [_table(layer, count, not one.stack.causal) for layer in one.encoding.layers]
        shared = all(torch.equal(table, tables[0]) for table in tables)
        for place, table in enumerate(tables[:1] if shared else tables):
            found[f"{side}.blk.{place}.attn_rel_b.weight"] = table
    return found


@torch.no_grad()
def _table(layer: LayerEncoding, count: int, bidirectional: bool) -> Tensor:
    bias = layer.logit_bias
    if bias is None:
        return torch.zeros(count, layer.num_heads)
    if not isinstance(bias, DistanceBias):
        raise UnsupportedError(f"llama.cpp's bias depends on the distance only; {type(bias).__name__} reads more")
    device = next((parameter.device for parameter in bias.parameters()), torch.device("cpu"))
    distance = torch.arange(-_FURTHEST, _FURTHEST + 1 if bidirectional else 1)
    values = bias(distance.to(device)).float().cpu().T
    bucket = llama_cpp_bucket(distance, count, bidirectional)
    table = torch.zeros(count, layer.num_heads).index_copy(0, bucket, values)
    other = (table[bucket] != values).any(-1).nonzero().flatten()
    if len(other):
        nearest = int(distance[other].abs().min())
        raise UnsupportedError(
            f"llama.cpp has {count} buckets of distances, the last of which starts at {_LAST}; {type(bias).__name__} "
            f"has several values in the bucket of distance {nearest}"
        )
    return table


def llama_cpp_bucket(distance: Tensor, count: int, bidirectional: bool) -> Tensor:
    """llama.cpp's bucket of a distance (`llama_relative_position_bucket` in its `llama-graph.cpp`).

    Args:
        distance: key position minus query position, int64 of any shape.
        count: number of buckets.
        bidirectional: whether later keys have buckets of their own; otherwise they have the bucket of distance 0.
    """
    half = count // 2 if bidirectional else count
    exact = half // 2
    if not 0 < exact < _LAST:
        raise UnsupportedError(f"llama.cpp has no {half} buckets for a direction that end at a distance of {_LAST}")
    first = (distance > 0).long() * half if bidirectional else torch.zeros_like(distance)
    steps = distance.abs() if bidirectional else (-distance).clamp(min=0)
    # The precision of each step decides at the edges of buckets.
    growth = torch.log((steps.clamp(min=1).double() / exact).float()) * (half - exact)
    later = (exact + growth.double() / math.log(_LAST / exact)).float().floor().long().clamp(max=half - 1)
    return first + torch.where(steps < exact, steps, later)
