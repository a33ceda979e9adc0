"""Attention with a bias that is never stored as a matrix: a function of distance, a number per key, or their sum.

The kernel processes a few rows of queries at a time, each block with its own bias. On a CPU, keys which none of its
queries sees or needs are skipped. If the bias is a number per key and no keys can be skipped, long calls fold these
numbers into queries and keys instead (`hf_posenc.attention.folding`). On other devices, all calls in half precision
with only a number per key do so.

The kernel's own backward pass would round the gradient of a folded dimension to the dtype of the heads, and does not
compute the gradient of a bias. So the backward pass recomputes the probabilities, a few rows at a time, and sums the
gradient of the scores in float32: over each diagonal, over the queries of each key and over the keys of each query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_posenc.attention.block_attention import (
    autocast_inputs,
    for_each_query_head,
    for_kernel,
    refuse_second_derivative,
    rows_without_keys,
    with_means,
    without_autocast,
)
from hf_posenc.attention.block_bias import BlockBias, diagonal_sums
from hf_posenc.attention.blockwise import (
    SIZES,
    Block,
    additive_mask,
    blockwise_backward,
    blockwise_forward,
    fitting_mask,
)
from hf_posenc.attention.folding import fold, of_one_width
from hf_posenc.attention.forms import FusedForm
from hf_posenc.attention.windows import windows_of

#: Minimum number of rows of a forward block if only the keys in a window are needed.
_WINDOW_ROWS = 320
#: Up to this many queries, a number per key is faster on a CPU in blocks than in wider heads.
_SHORT = 1024
#: Queries from which on blocks of a distance bias may be larger.
_LONG = 4096


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, form: FusedForm, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    """`softmax(scaling * query . key + bias) . value`.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`; on the CPU the fast kernel needs `head_dim` here too.
        form: the bias, float32.
        mask: boolean (visible pairs) or additive; broadcasts to `(batch, 1 or heads, query_len, key_len)`.
        scaling: factor of `query . key`.
        causal: whether query i sees no key after key i; without a mask, and with as many keys as queries.

    Returns:
        `(batch, query_len, heads, value_dim)`, in the dtype of the query.

    Raises:
        UnsupportedError: for a mask of another shape, and in the second of two backward passes.
    """
    query, key, value = autocast_inputs(query, key, value)
    mask = fitting_mask(mask, query.shape[2], key.shape[2])
    terms = None if form.terms is None else form.terms.expand(query.shape[0], -1, -1)
    result: Tensor = _fused_attention(query, key, value, form.vector, terms, form.query_slots, mask, scaling, causal)
    empty = None if mask is None else rows_without_keys(mask)
    return result if empty is None else with_means(result, value, empty)


@torch.library.custom_op("hf_posenc::fused_attention", mutates_args=())
def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor | None,
    terms: Tensor | None,
    query_slots: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    windows = windows_of((query, key, value), vector, terms, mask, scaling, causal)
    query_length, sizes = query.shape[2], SIZES[query.is_cpu]
    if windows is not None:
        # Such a block has few heads, so each thread gets a tile of 64 rows.
        rows = max(_WINDOW_ROWS, 64 * torch.get_num_threads())
    elif terms is None:
        rows = sizes.distance_rows if query_length < _LONG else sizes.long_distance_rows
    elif vector is not None or not folds(query):
        rows = sizes.term_rows
    else:
        assert query_slots is not None
        return _folded(query, key, value, terms, query_slots, mask, scaling, causal)
    bias = BlockBias(vector, terms, query_slots, mask, query_length, causal, windows)
    return blockwise_forward(query, key, value, scaling, bias, rows)


def folds(query: Tensor) -> bool:
    """Whether a number per key is folded into queries and keys of such a call, if no keys can be skipped.

    In float32 the kernels of GPUs do not sum a product in the order of its dimensions, so that large terms would cost
    digits of the content.
    """
    return query.shape[2] >= _SHORT if query.is_cpu else query.dtype in (torch.bfloat16, torch.float16)


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
    wide_query, wide_key, wide_value = of_one_width(wide_query, wide_key, value)
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


@_fused_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@torch.library.custom_op("hf_posenc::fused_attention_backward", mutates_args=())
def _fused_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor | None,
    terms: Tensor | None,
    query_slots: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    learned: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients. `learned` selects those of the vector and of the terms; others are empty."""
    query_length = query.shape[2]
    windows = windows_of((query, key, value), vector, terms, mask, scaling, causal, gradient, any(learned))
    bias = BlockBias(vector, terms, query_slots, mask, query_length, causal, windows)
    of_vector, of_terms = _gradients_of_bias(query, vector, terms, learned)

    def add(scores: Tensor, block: Block) -> None:
        if learned[0]:
            sums = torch.unflatten(diagonal_sums(scores.flatten(0, 1)), 0, scores.shape[:2]).sum(0)
            farthest = query_length - block.stop + block.first
            of_vector[block.heads, farthest : farthest + sums.shape[-1]] += sums
        if learned[1]:
            # A query's own term changes no weight, so it has no gradient.
            of_terms[block.items, block.heads, block.keys] += scores.sum(-2)

    of_heads = blockwise_backward(gradient, query, key, value, scaling, bias, add)
    return *of_heads, of_vector, of_terms


@_fused_attention_backward.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, vector: Any, terms: Any, *rest: Any) -> tuple[Tensor, ...]:
    learned = rest[-1]
    of_bias = _gradients_of_bias(query, vector, terms, learned)
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape), *of_bias


def _gradients_of_bias(
    query: Tensor, vector: Tensor | None, terms: Tensor | None, learned: list[bool]
) -> tuple[Tensor, Tensor]:
    """Returns zeros like the vector and the terms; empty if no gradient is needed."""
    of_vector, of_terms = (
        like.new_zeros(like.shape) if wanted and like is not None else query.new_empty(0)
        for like, wanted in zip((vector, terms), learned, strict=True)
    )
    return of_vector, of_terms


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scaling, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    learned = list(ctx.needs_input_grad[3:5])
    given = (*ctx.saved_tensors, ctx.scaling, ctx.causal, learned)
    *of_heads, of_vector, of_terms = _fused_attention_backward(gradient, *given)
    return *of_heads, of_vector if learned[0] else None, of_terms if learned[1] else None, None, None, None, None


_fused_attention.register_autograd(_backward, setup_context=_save)
_fused_attention_backward.register_autograd(refuse_second_derivative)
