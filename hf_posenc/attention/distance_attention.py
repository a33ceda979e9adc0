"""Attention with a bias of distance that never exists as a matrix.

A bias that depends on distance alone is a Toeplitz matrix, which one vector per head describes. With the queries in
reverse order it becomes a Hankel matrix, `bias[i, j] = vector[i + j]`, and that is a *view* of the vector with both
strides 1: torch's kernels read it as an attention mask like any other, and nothing of the size of the matrix is ever
allocated. The mask of a causal layer is part of the vector, and queries are taken in blocks of rows, so that keys which
none of them sees are skipped.

The backward pass computes the probabilities of a few rows at a time again. The gradient of the vector is the sum over
each diagonal of the gradient of the scores: written into rows that are one longer than they should be, the diagonals
become columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_posenc.attention.block_attention import additive_mask

aten = torch.ops.aten

#: Rows of a forward block, below and from `_LONG` queries on. Torch's CPU kernel divides 192 to 767 rows into tiles of
#: 64 and more into tiles of 256; the smaller block skips more of a causal layer's invisible keys.
_SHORT_ROWS, _LONG_ROWS, _LONG = 256, 768, 4096
#: Rows of a backward block: enough for the matrix products to be efficient, few enough to stay in the caches.
_BACKWARD_ROWS = 128
#: How many scores a block may hold, 4 bytes each.
_BLOCK_SCORES = 2**23


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
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    result: Tensor = _distance_attention(query, key, value, vector, mask, scaling, causal)
    return result


@torch.library.custom_op("hf_posenc::distance_attention", mutates_args=())
def _distance_attention(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    batch, heads, query_length, _ = query.shape
    key_length = key.shape[2]
    key, value = _for_each_query_head(key, heads), _for_each_query_head(value, heads)
    vector = _with_causal_mask(vector, query_length, causal)
    output = query.new_empty(batch, query_length, heads, value.shape[-1])
    rows = _SHORT_ROWS if query_length < _LONG else _LONG_ROWS
    for items, start, stop in _blocks(batch, heads, query_length, key_length, rows, mask is not None):
        first, last = _visible_keys(mask, items, start, stop, key_length, causal)
        keys = slice(first, last)
        bias = _bias_of_rows(vector, mask, items, start, stop, first, last, query_length)
        if bias.dtype != query.dtype and query.device.type != "cpu":
            bias = bias.to(query.dtype)
        block = scaled_dot_product_attention(
            query[items, :, start:stop].flip(2),
            key[items, :, keys],
            value[items, :, keys],
            attn_mask=bias,
            scale=scaling,
        )
        output[items, start:stop] = block.flip(2).transpose(1, 2)
    return output


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
    batch, heads, query_length, _ = query.shape
    key_length, groups = key.shape[2], query.shape[1] // key.shape[1]
    of_query = torch.empty_like(query)
    # float32 throughout: in the dtype of a half precision model the probabilities would lose what the forward had.
    # Contiguous, so that batch and heads can be one axis without a copy in every block.
    keys, values = (_for_each_query_head(tensor, heads).float().contiguous() for tensor in (key, value))
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    vector = _with_causal_mask(vector, query_length, causal)
    diagonals = _Diagonals(vector, key_length) if of_vector else None
    blocks = list(_blocks(batch, heads, query_length, key_length, _BACKWARD_ROWS, True))
    # Blocks differ in size, and memory that is taken anew for each would pile up in pieces that are a little too small.
    largest = max((min(items.stop, batch) - items.start) * (stop - start) for items, start, stop in blocks)
    buffers = [keys.new_empty(largest * heads * key_length) for _ in range(2)]
    with torch.autocast(query.device.type, enabled=False):
        for items, start, stop in blocks:
            first, last = _visible_keys(mask, items, start, stop, key_length, causal)
            seen = slice(first, last)
            bias = _bias_of_rows(vector, mask, items, start, stop, first, last, query_length)
            query_rows = (query[items, :, start:stop].float() * scaling).flip(2).flatten(0, 1)
            output_rows = gradient[items, start:stop].transpose(1, 2).float().flip(2).flatten(0, 1)
            key_rows, value_rows, of_key_rows, of_value_rows = (
                tensor[items].flatten(0, 1)[:, seen] for tensor in (keys, values, of_key, of_value)
            )
            shape = (*query_rows.shape[:2], last - first)
            scores, probabilities = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            torch.bmm(query_rows, key_rows.transpose(1, 2), out=scores).unflatten(0, (-1, heads)).add_(bias)
            aten._softmax.out(scores, -1, False, out=probabilities)
            of_scores = torch.bmm(output_rows, value_rows.transpose(1, 2), out=scores)
            aten._softmax_backward_data.out(of_scores, probabilities, -1, torch.float32, grad_input=of_scores)
            of_value_rows.baddbmm_(probabilities.transpose(1, 2), output_rows)
            of_key_rows.baddbmm_(of_scores.transpose(1, 2), query_rows)
            of_query_rows = torch.bmm(of_scores, key_rows).mul_(scaling)
            of_query[items, :, start:stop] = of_query_rows.unflatten(0, (-1, heads)).flip(2)
            if diagonals is not None:
                diagonals.add(of_scores, query_length - stop + first)
    of_key, of_value = (
        tensor.unflatten(1, (-1, groups)).sum(2).to(like.dtype) for tensor, like in ((of_key, key), (of_value, value))
    )
    return of_query, of_key, of_value, vector.new_empty(0) if diagonals is None else diagonals.total


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


class _Diagonals:
    """The sum of score gradients over each diagonal.

    Args:
        vector: `(heads, query_len + key_len - 1)`, what the gradient is of.
        key_length: number of keys.
    """

    def __init__(self, vector: Tensor, key_length: int) -> None:
        self.total = torch.zeros_like(vector)
        self._key_length = key_length
        self._rows = vector.new_empty(0)
        self._width = 0

    def add(self, scores: Tensor, first: int) -> None:
        """Adds a block `(batch * heads, rows, keys)` whose first entry belongs to `vector[:, first]`."""
        count, rows, width = scores.shape
        shape = (count, rows, rows + self._key_length)
        if self._rows.shape != shape or width < self._width:
            # Around the band that a block fills there have to be zeros; a wider band covers what was there before.
            self._rows = scores.new_zeros(shape)
        self._width = width
        pitch = shape[-1]
        self._rows.as_strided(scores.shape, (rows * pitch, pitch + 1, 1)).copy_(scores)
        sums = self._rows[:, :, : rows + width - 1].sum(1)
        self.total[:, first : first + rows + width - 1] += sums.unflatten(0, (-1, len(self.total))).sum(0)


def _for_each_query_head(tensor: Tensor, heads: int) -> Tensor:
    """`(batch, heads, key_len, width)` from `(batch, key_value_heads, key_len, width)`."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _with_causal_mask(vector: Tensor, query_length: int, causal: bool) -> Tensor:
    """The vector with -inf at every later key."""
    vector = vector.contiguous()
    if not causal:
        return vector
    vector = vector.clone()
    vector[:, query_length:] = -torch.inf
    return vector


def _blocks(
    batch: int, heads: int, query_length: int, key_length: int, rows: int, limited: bool
) -> Iterator[tuple[slice, int, int]]:
    """Batch items and rows `[start, stop)` of each block; `limited` to `_BLOCK_SCORES` scores where it can."""
    items = batch
    if limited:
        rows = min(rows, max(16, _BLOCK_SCORES // (heads * key_length)))
        items = max(1, _BLOCK_SCORES // (heads * key_length * min(rows, query_length)))
    for first in range(0, batch, items):
        for start in range(0, query_length, rows):
            yield slice(first, first + items), start, min(start + rows, query_length)


def _visible_keys(
    mask: Tensor | None, items: slice, start: int, stop: int, key_length: int, causal: bool
) -> tuple[int, int]:
    """The keys `[first, last)` outside of which no query of a block sees any."""
    if causal:
        return 0, stop
    if mask is None or mask.dtype != torch.bool or mask.device.type != "cpu":
        return 0, key_length
    seen = _rows_of(mask, items, start, stop).any(-2).flatten(0, -2).any(0).nonzero()
    # A block of padding tokens may see nothing; the mask gives all of its keys the same weight then.
    return (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, key_length)


def _rows_of(mask: Tensor, items: slice, start: int, stop: int) -> Tensor:
    """`(batch or 1, 1 or heads, rows or 1, key_len)`."""
    if mask.shape[0] > 1:
        mask = mask[items]
    return mask[:, :, start:stop] if mask.shape[2] > 1 else mask


def _bias_of_rows(
    vector: Tensor, mask: Tensor | None, items: slice, start: int, stop: int, first: int, last: int, query_length: int
) -> Tensor:
    """`(batch or 1, heads, rows, keys)` float32, queries reversed: a view of the vector where there is no mask."""
    farthest = query_length - stop + first
    shape = (1, vector.shape[0], stop - start, last - first)
    bias = vector.as_strided(shape, (0, vector.stride(0), 1, 1), vector.storage_offset() + farthest)
    if mask is None:
        # Kernels of accelerators want rows that start at aligned addresses.
        return bias if vector.device.type == "cpu" else bias.contiguous()
    rows = _rows_of(mask, items, start, stop)[..., first:last].flip(-2)
    return bias + additive_mask(rows, vector.dtype)
