"""Attention with a bias of distance that never exists as a matrix.

A bias that depends on distance alone is a Toeplitz matrix, which one vector per head describes. With the queries in
reverse order it becomes a Hankel matrix, `bias[i, j] = vector[i + j]`, and that is a *view* of the vector with both
strides 1: torch's kernels read it as an attention mask like any other, and nothing of the size of the matrix is ever
allocated. The mask of a causal layer is part of the vector, and queries are taken in blocks of rows, so that keys which
none of them sees are skipped.

The gradient of the vector is the sum over each diagonal of the gradient of the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.blockwise import (
    Block,
    autocast_inputs,
    blockwise_backward,
    blockwise_forward,
    fitting_mask,
    mask_of_block,
    refuse_second_derivative,
    rows_of_window_blocks,
)
from hf_posenc.attention.windows import Windows, call_of, windows_of_distance

#: Rows of a forward block, below and from `_LONG` queries on. Torch's CPU kernel divides 192 to 767 rows into tiles of
#: 64 and more into tiles of 256; the smaller block skips more of a causal layer's invisible keys.
_SHORT_ROWS, _LONG_ROWS, _LONG = 256, 768, 4096


def distance_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    """`softmax(scaling * query . key + bias) . value`, for a bias that is a function of distance.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`; on the CPU the fast kernel wants `head_dim` here too.
        vector: `(heads, query_len + key_len - 1)` float32, the bias by rising distance: of query i and key j it is
            `vector[:, j - i + query_len - 1]`.
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
    result: Tensor = _distance_attention(query, key, value, vector, mask, scaling, causal)
    return result


@torch.library.custom_op("hf_posenc::distance_attention", mutates_args=())
def _distance_attention(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    windows = windows_of_distance(call_of(query, key, value, mask, scaling, causal), vector)
    rows = _SHORT_ROWS if query.shape[2] < _LONG else _LONG_ROWS
    if windows is not None:
        rows = rows_of_window_blocks()
    bias = _DistanceRows(vector, mask, query.shape[2], causal, windows)
    return blockwise_forward(query, key, value, mask, scaling, causal, bias.of, rows, windows)


@_distance_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@torch.library.custom_op("hf_posenc::distance_attention_backward", mutates_args=())
def _distance_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    of_vector: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query_length = query.shape[2]
    windows = windows_of_distance(call_of(query, key, value, mask, scaling, causal, gradient), vector)
    bias = _DistanceRows(vector, mask, query_length, causal, windows)
    total = torch.zeros_like(vector) if of_vector else vector.new_empty(0)

    def add(scores: Tensor, block: Block) -> None:
        if of_vector:
            sums = _diagonal_sums(scores.flatten(0, 1)).unflatten(0, scores.shape[:2]).sum(0)
            farthest = query_length - block.stop + block.first
            total[block.heads, farthest : farthest + sums.shape[-1]] += sums

    found = blockwise_backward(gradient, query, key, value, mask, scaling, causal, bias.of, add, windows)
    return *found, total


@_distance_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    of_vector: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_vector_like = torch.empty_like(vector) if of_vector else vector.new_empty(0)
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape), of_vector_like


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scaling, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    of_vector = ctx.needs_input_grad[3]
    gradients = _distance_attention_backward(gradient, *ctx.saved_tensors, ctx.scaling, ctx.causal, of_vector)
    return *gradients[:3], gradients[3] if of_vector else None, None, None, None


_distance_attention.register_autograd(_backward, setup_context=_save)
_distance_attention_backward.register_autograd(refuse_second_derivative)


class _DistanceRows:
    """The bias of a block, a view of the vector where there is no mask.

    Args:
        vector: `(heads, query_len + key_len - 1)` by rising distance.
        mask: as `fitting_mask` returns it.
        query_length: number of queries.
        causal: whether later keys are hidden.
        windows: which keys count.
    """

    def __init__(
        self, vector: Tensor, mask: Tensor | None, query_length: int, causal: bool, windows: Windows | None
    ) -> None:
        self.vector = vector.contiguous()
        if causal:
            self.vector = self.vector.clone()
            self.vector[:, query_length:] = -torch.inf
        if windows is not None:
            # A block has keys that only some of its rows need. For the others their weights would be subnormal numbers,
            # which some processors compute a hundred times slower.
            distances = torch.arange(vector.shape[1], device=vector.device) - (windows.key_length - 1)
            self.vector = self.vector.masked_fill(windows.unneeded(distances), -torch.inf)
        self.mask = mask
        self.query_length = query_length

    def of(self, block: Block) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32, queries reversed."""
        vector = self.vector[block.heads]
        farthest = self.query_length - block.stop + block.first
        shape = (1, vector.shape[0], block.stop - block.start, block.last - block.first)
        bias = vector.as_strided(shape, (0, vector.stride(0), 1, 1), vector.storage_offset() + farthest)
        if self.mask is not None:
            return bias + mask_of_block(self.mask, block, vector.dtype)
        # Kernels of accelerators want rows that start at aligned addresses.
        return bias if vector.device.type == "cpu" else bias.contiguous()


def _diagonal_sums(scores: Tensor) -> Tensor:
    """`(count, rows + keys - 1)`, the sums over entries of `(count, rows, keys)` with the same row plus key.

    Read with rows that are one shorter than they are, diagonals are columns. Only at both ends do such columns hold two
    diagonals each.
    """
    count, rows, width = scores.shape
    if width <= 2 * rows + 1:
        return _sums_of_corner(scores)
    columns = scores.as_strided((count, rows, width - 1), (rows * width, width - 1, 1), scores.storage_offset()).sum(1)
    first = _sums_of_corner(scores[..., :rows])[:, :rows]
    last = _sums_of_corner(scores[..., -rows:])[:, rows - 1 :]
    return torch.cat((first, columns[:, rows:], last), dim=1)


def _sums_of_corner(scores: Tensor) -> Tensor:
    """The same, by way of a copy with rows that are one longer than they should be."""
    count, rows, width = scores.shape
    pitch = rows + width
    longer = scores.new_zeros(count, rows, pitch)
    longer.as_strided(scores.shape, (rows * pitch, pitch + 1, 1)).copy_(scores)
    return longer[..., : rows + width - 1].sum(1)
