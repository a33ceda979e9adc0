"""The fused kernel with one kind of bias."""

from __future__ import annotations

from torch import Tensor

from hf_posenc.attention.fused_attention import fused_attention


def distance_attention(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    return fused_attention(query, key, value, vector, None, None, mask, scaling, causal)


def separable_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    return fused_attention(query, key, value, None, terms, query_slots, mask, scaling, causal)
