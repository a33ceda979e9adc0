"""Attention with a number per key: in blocks, or folded into the heads on the way forward.

On a CPU, short calls and calls whose far keys do not count go through the kernel in blocks, each with its own bias. The
others, and every call elsewhere, have the numbers folded into their queries and keys.

The kernel's own backward pass would round the gradient of the folded dimension to the dtype of the heads, and sums of
gradients over all tokens, as those of a forget gate are, would consist of nothing else. So the backward pass sums the
gradient of the scores itself, in float32, over the queries of each key and over the keys of each query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_posenc.attention.blockwise import (
    Block,
    additive_mask,
    autocast_inputs,
    blockwise_backward,
    blockwise_forward,
    fitting_mask,
    for_each_query_head,
    for_kernel,
    mask_of_block,
    refuse_second_derivative,
    rows_of_window_blocks,
    without_autocast,
)
from hf_posenc.attention.folding import fold
from hf_posenc.attention.windows import Windows, call_of, windows_of_terms

#: Up to this many queries a bias per block costs a processor less than wider heads do.
_SHORT = 1024
#: Rows of such a block.
_SHORT_ROWS = 128


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
    """`softmax(scaling * query . key + terms[j] - terms[i]) . value`.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        terms: `(batch or 1, heads, key_len)` float32.
        query_slots: `(query_len,)` int64, which of the keys belongs to the same token as each query.
        mask: which pairs are visible (boolean), or what is added to their logits; broadcasts to
            `(batch, 1 or heads, query_len, key_len)`.
        scaling: factor of `query . key`.
        causal: whether query i sees no key behind key i; without a mask, and with as many keys as queries.

    Returns:
        `(batch, query_len, heads, value_dim)`, in the dtype of the query.

    Raises:
        UnsupportedError: for a mask of another shape, and in the second of two backward passes.
    """
    query, key, value = autocast_inputs(query, key, value)
    mask = fitting_mask(mask, query.shape[2], key.shape[2])
    terms = terms.expand(query.shape[0], -1, -1)
    result: Tensor = _separable_attention(query, key, value, terms, query_slots, mask, scaling, causal)
    return result


@torch.library.custom_op("hf_posenc::separable_attention", mutates_args=())
def _separable_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    windows = windows_of_terms(call_of(query, key, value, mask, scaling, causal), terms)
    if windows is not None or (query.device.type == "cpu" and query.shape[2] < _SHORT):
        return _by_blocks(query, key, value, terms, query_slots, mask, scaling, causal, windows)
    return _folded(query, key, value, terms, query_slots, mask, scaling, causal)


def _by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    windows: Windows | None,
) -> Tensor:
    rows = _SHORT_ROWS if windows is None else rows_of_window_blocks()
    bias = _TermRows(terms, query_slots, mask, causal)
    return blockwise_forward(query, key, value, mask, scaling, causal, bias.of, rows, windows)


def _folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    heads = query.shape[1]
    wide_query, wide_key, scaling = fold(query, key, terms, query_slots, scaling)
    wide_value = pad(value, (0, wide_query.shape[-1] - value.shape[-1]))
    added = None if mask is None else for_kernel(additive_mask(mask, torch.float32), query)
    with without_autocast(query.device):
        output = scaled_dot_product_attention(
            wide_query,
            for_each_query_head(wide_key, heads),
            for_each_query_head(wide_value, heads),
            attn_mask=added,
            is_causal=causal,
            scale=scaling,
        )
    return output[..., : value.shape[-1]].transpose(1, 2).contiguous()


@_separable_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@torch.library.custom_op("hf_posenc::separable_attention_backward", mutates_args=())
def _separable_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_terms = torch.zeros_like(terms, memory_format=torch.contiguous_format)
    of_queries = terms.new_zeros(*terms.shape[:2], query.shape[2])
    bias = _TermRows(terms, query_slots, mask, causal)

    def add(scores: Tensor, block: Block) -> None:
        of_terms[block.items, block.heads, block.keys] += scores.sum(-2)
        of_queries[block.items, block.heads, block.start : block.stop] = scores.sum(-1).flip(-1)

    windows = windows_of_terms(call_of(query, key, value, mask, scaling, causal, gradient), terms)
    found = blockwise_backward(gradient, query, key, value, mask, scaling, causal, bias.of, add, windows)
    return *found, of_terms.index_add_(-1, query_slots, of_queries, alpha=-1)


@_separable_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor,
    query_slots: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_key, of_value, of_terms = (tensor.new_empty(tensor.shape) for tensor in (key, value, terms))
    return torch.empty_like(query), of_key, of_value, of_terms


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scaling, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradients = _separable_attention_backward(gradient, *ctx.saved_tensors, ctx.scaling, ctx.causal)
    return *gradients, None, None, None, None


_separable_attention.register_autograd(_backward, setup_context=_save)
_separable_attention_backward.register_autograd(refuse_second_derivative)


class _TermRows:
    """The bias of a block, mask included.

    Args:
        terms: `(batch, heads, key_len)` float32.
        query_slots: `(query_len,)` int64.
        mask: as `fitting_mask` returns it.
        causal: whether query i sees no key behind key i.
    """

    def __init__(self, terms: Tensor, query_slots: Tensor, mask: Tensor | None, causal: bool) -> None:
        self.terms = terms
        self.own = terms.index_select(-1, query_slots)
        self.mask = mask
        self.causal = causal

    def of(self, block: Block) -> Tensor:
        """`(items, heads, rows, keys)` float32, queries reversed."""
        rows = self.own[block.items, block.heads, block.start : block.stop].flip(-1)
        bias = self.terms[block.items, block.heads, block.keys].unsqueeze(-2) - rows.unsqueeze(-1)
        if self.mask is not None:
            return bias.add_(mask_of_block(self.mask, block, bias.dtype))
        if self.causal:
            # Only the queries' own keys, the last ones, can be later than one of them.
            count = block.stop - block.start
            later = torch.ones(count, count, dtype=torch.bool, device=bias.device).tril(-1).flip(-1)
            bias[..., block.start - block.first :].add_(additive_mask(~later, bias.dtype))
        return bias
