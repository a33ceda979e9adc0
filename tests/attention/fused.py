"""The fused kernel with one kind of bias."""

from __future__ import annotations

from torch import Tensor

from hf_posenc.attention.forms import DistanceForm, SeparableForm
from hf_posenc.attention.fused_attention import fused_attention


def distance_attention(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    form = DistanceForm(vector, query.shape[2], key.shape[2])
    return fused_attention(query, key, value, form, mask, scaling, causal)


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
    return fused_attention(query, key, value, SeparableForm(terms, query_slots), mask, scaling, causal)
