"""The fused kernel with one kind of bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc.attention import block_attention
from hf_posenc.attention.backends import attention_with
from hf_posenc.attention.block_attention import AttentionCall
from hf_posenc.attention.forms import BiasForm, FusedForm
from hf_posenc.attention.fused_attention import fused_attention


def attended(
    form: BiasForm, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """What a layer with sdpa computes, `(batch, query_len, heads, width)`."""
    module = nn.Module()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    call = AttentionCall("sdpa", sdpa_attention_forward, mask, (), options)
    output: Tensor = attention_with(call, form, module, query, key)(module, query, key, value)[0]
    return output


def masks_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that reach the kernel from now on."""
    seen: list[Tensor] = []
    kernel = block_attention.scaled_dot_product_attention

    def heard(*heads: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        seen.append(attn_mask)
        return kernel(*heads, attn_mask=attn_mask, **options)

    monkeypatch.setattr(block_attention, "scaled_dot_product_attention", heard)
    return seen


def distance_attention(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    form = FusedForm(vector, query.shape[2], key.shape[2])
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
    return fused_attention(query, key, value, FusedForm.of_keys(terms, query_slots), mask, scaling, causal)


def flash_kernel(visible: Callable[[int, int, Any], Tensor]) -> Callable[..., Any]:
    """An attention function that knows queries, keys, values and a scale, and nothing of a bias.

    Args:
        visible: says which pairs it shows, from the numbers of queries and keys and the mask that it is given.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        assert query.shape[-1] == value.shape[-1]
        seen = visible(query.shape[2], key.shape[2], mask)
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    return attend


def causal(queries: int, keys: int, mask: Any = None) -> Tensor:
    """Each query sees the keys up to its own, which is the last one for the last query."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
