"""Shared code of the fused forms: blocks of query rows, their masks, and the backward pass of a block.

Within a block queries are in reverse order, which makes a distance bias a view of a vector
(`hf_posenc.attention.block_bias`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_posenc.attention.block_attention import for_each_query_head, for_kernel, without_autocast
from hf_posenc.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_posenc.attention.block_bias import BlockBias

aten = torch.ops.aten


class Sizes(NamedTuple):
    """Sizes of the blocks of attention with a bias. The defaults suit the caches of a CPU (an AMD EPYC, an Intel Xeon).

    An accelerator computes a block faster than Python launches it, so blocks are large (docs/results/gpu/blocks.md).
    """

    #: Up to this many pairs of a query and a key, a bias of any form is one matrix.
    short_pairs: int = 128**2
    #: Up to this many numbers, layers share one matrix of a fixed distance bias.
    shared_numbers: int = 0
    #: Numbers of a block of a bias that is computed pair by pair, 4 bytes each. C libraries return freed memory of 32
    #: MiB or more to the system; smaller pieces of growing sizes would fragment the memory.
    bias_numbers: int = 2**23
    #: Up to this many, each layer keeps the inputs of such a bias, several times its size, for its gradients.
    kept_numbers: int = 2**23
    #: Up to this many, the probabilities of a short text with a learned bias are kept too.
    kept_probabilities: int = 2**20
    #: From this many queries on, a causal bias has at least four blocks.
    divided_length: int = 512
    #: Queries of a block for a distance bias. Torch's CPU kernel divides 192 to 767 rows into tiles of 64 and more into
    #: tiles of 256; the smaller block skips more of a causal layer's invisible keys.
    distance_rows: int = 256
    long_distance_rows: int = 768
    #: Queries of a block for a number per key, and of a backward pass.
    term_rows: int = 128
    backward_rows: int = 128
    #: Maximum number of scores of a block, 4 bytes each.
    scores: int = 2**23


#: The sizes, by `is_cpu` of a tensor.
SIZES = {True: Sizes(), False: Sizes(
    short_pairs=256**2, shared_numbers=2**26, bias_numbers=2**25, kept_probabilities=0, divided_length=4096,
    distance_rows=2048, long_distance_rows=2048, term_rows=2048, backward_rows=1024, scores=2**26,
)}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A block of queries and the range of keys that they see and need.

    Args:
        items: the items of the batch.
        heads: the query heads.
        start: first query.
        stop: end of the queries (exclusive).
        first: first key.
        last: end of the keys (exclusive).
    """

    items: slice
    heads: slice
    start: int
    stop: int
    first: int
    last: int

    @property
    def items_and_heads(self) -> int:
        """Number of heads of all items together."""
        return (self.items.stop - self.items.start) * (self.heads.stop - self.heads.start)

    @property
    def keys(self) -> slice:
        """The keys."""
        return slice(self.first, self.last)


def blocks(query: Tensor, key_length: int, bias: BlockBias, rows: int, limited: bool) -> list[Block]:
    """Divides the queries of a batch. With windows, each block has one item of it, and heads with similar windows.

    Args:
        query: `(batch, heads, query_len, width)`.
        key_length: number of keys.
        bias: the bias, which states the keys that are seen and needed.
        rows: queries per block.
        limited: whether to limit the scores of a block, if possible.
    """
    batch, heads, query_length, _ = query.shape
    result = []
    most_scores = SIZES[query.is_cpu].scores if limited else None
    for items, start, stop in _divided(batch, heads, query_length, key_length, rows, most_scores):
        if bias.windows is None:
            first, last = _visible_keys(bias, items, start, stop, key_length)
            result.append(Block(items, slice(0, heads), start, stop, first, last))
            continue
        for item in range(items.start, items.stop):
            of_item = slice(item, item + 1)
            first, last = _visible_keys(bias, of_item, start, stop, key_length)
            for some, begin, end in bias.windows.of_rows(item, start, stop):
                if max(begin, first) < min(end, last):
                    begin, end = max(begin, first), min(end, last)
                result.append(Block(of_item, some, start, stop, begin, end))
    return result


def _divided(
    batch: int, heads: int, query_length: int, key_length: int, rows: int, most_scores: int | None
) -> Iterator[tuple[slice, int, int]]:
    items = max(1, batch)
    if most_scores is not None:
        row_scores = max(1, heads * key_length)
        rows = min(rows, max(16, most_scores // row_scores))
        items = max(1, most_scores // (row_scores * max(1, min(rows, query_length))))
    for first in range(0, batch, items):
        for start in range(0, query_length, rows):
            yield slice(first, min(first + items, batch)), start, min(start + rows, query_length)


def _visible_keys(bias: BlockBias, items: slice, start: int, stop: int, key_length: int) -> tuple[int, int]:
    mask = bias.mask
    if bias.causal:
        return 0, min(stop, key_length)
    if mask is None or mask.dtype != torch.bool or mask.device.type != "cpu":
        return 0, key_length
    seen = rows_of(mask, items, slice(None), start, stop).any(-2).flatten(0, -2).any(0).nonzero()
    # A block of padding tokens may not see any key. The mask then gives all of its keys the same weight.
    return (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, key_length)


def rows_of(mask: Tensor, items: slice, heads: slice, start: int, stop: int) -> Tensor:
    """The part of a mask for the queries `[start, stop)`, `(items or 1, heads or 1, rows or 1, keys)`."""
    if mask.shape[0] > 1:
        mask = mask[items]
    if mask.shape[1] > 1:
        mask = mask[:, heads]
    return mask[:, :, start:stop] if mask.shape[2] > 1 else mask


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a mask to an additive mask, with the smallest number for pairs hidden by a boolean mask."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def fitting_mask(mask: Tensor | None, query_length: int, key_length: int) -> Tensor | None:
    """Returns a mask with an entry for every key: a broadcast mask is repeated, entries for later slots are removed.

    Raises:
        UnsupportedError: for a mask that fits neither queries nor keys.
    """
    if mask is None:
        return None
    mask = mask.expand(*mask.shape[:-1], key_length) if mask.shape[-1] == 1 else mask[..., :key_length]
    if mask.dim() != 4 or mask.shape[-1] != key_length or mask.shape[2] not in (1, query_length):
        raise UnsupportedError(
            f"The attention mask is {tuple(mask.shape)}, for {query_length} queries and {key_length} keys; expected "
            "(batch or 1, heads or 1, queries or 1, keys or 1)."
        )
    return mask


def blockwise_forward(query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: BlockBias, rows: int) -> Tensor:
    """Computes the forward pass, a few rows at a time, without keys that none of the rows sees or needs.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        scaling: factor of `query . key`.
        bias: the bias, including the mask.
        rows: queries per block.

    Returns:
        `(batch, query_len, heads, value_dim)`.
    """
    batch, heads, query_length, _ = query.shape
    key, value = for_each_query_head(key, heads), for_each_query_head(value, heads)
    output = query.new_empty(batch, query_length, heads, value.shape[-1])
    # Autocast would round the bias.
    with without_autocast(query.device):
        # On a CPU, a bias without a mask is a view.
        for block in blocks(query, key.shape[2], bias, rows, bias.mask is not None or not query.is_cpu):
            result = scaled_dot_product_attention(
                query[block.items, block.heads, block.start : block.stop].flip(2),
                key[block.items, block.heads, block.keys],
                value[block.items, block.heads, block.keys],
                attn_mask=for_kernel(bias.of(block), query),
                scale=scaling,
            )
            output[block.items, block.start : block.stop, block.heads] = result.flip(2).transpose(1, 2)
    return output


def blockwise_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    bias: BlockBias,
    on_scores: Callable[[Tensor, Block], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values, recomputing the probabilities a few rows at a time.

    Everything is computed in at least float32, because half precision would be less accurate than the forward pass.

    `gradient` is that of the output, `(batch, query_len, heads, value_dim)`. `on_scores` is called with that of the
    scores of every block, `(batch, heads, rows, keys)`, queries reversed. The others are as in `blockwise_forward`.
    """
    heads, key_length = query.shape[1], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    of_query = torch.empty_like(query)
    # Contiguous, so that batch and heads can be one axis without a copy in every block.
    keys, values = (for_each_query_head(tensor, heads).to(dtype).contiguous() for tensor in (key, value))
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    divided = blocks(query, key_length, bias, SIZES[query.is_cpu].backward_rows, True)
    # Blocks differ in size, and separate allocations for each would fragment the memory.
    sizes = [block.items_and_heads * (block.stop - block.start) for block in divided]
    buffers = [keys.new_empty(max(sizes, default=0) * key_length) for _ in range(2)]
    # A mask and a bias that is -inf beyond a distance may together hide all keys of a padding query: softmax gives NaN.
    may_be_empty = bias.mask is not None
    with without_autocast(query.device):
        for block in divided:
            items, some, rows = block.items, block.heads, slice(block.start, block.stop)
            query_rows = (query[items, some, rows].to(dtype) * scaling).flip(2).flatten(0, 1)
            output_rows = gradient[items, rows, some].transpose(1, 2).to(dtype).flip(2).flatten(0, 1)
            # Views `(items * heads, ...)`, which are possible because a block has either all heads or a single item.
            key_rows, value_rows, of_key_rows, of_value_rows = (
                tensor[items, some].view(block.items_and_heads, *tensor.shape[2:])[:, block.keys]
                for tensor in (keys, values, of_key, of_value)
            )
            of_block = (items.stop - items.start, some.stop - some.start)
            shape = (*query_rows.shape[:2], block.last - block.first)
            scores, probabilities = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            torch.unflatten(torch.bmm(query_rows, key_rows.transpose(1, 2), out=scores), 0, of_block).add_(
                bias.of(block)
            )
            aten._softmax.out(scores, -1, False, out=probabilities)
            if may_be_empty:
                probabilities.nan_to_num_(0.0)
            of_scores = torch.bmm(output_rows, value_rows.transpose(1, 2), out=scores)
            aten._softmax_backward_data.out(of_scores, probabilities, -1, dtype, grad_input=of_scores)
            of_value_rows.baddbmm_(probabilities.transpose(1, 2), output_rows)
            of_key_rows.baddbmm_(of_scores.transpose(1, 2), query_rows)
            of_query_rows = torch.bmm(of_scores, key_rows).mul_(scaling)
            of_query[items, some, rows] = torch.unflatten(of_query_rows, 0, of_block).flip(2).to(query.dtype)
            on_scores(torch.unflatten(of_scores, 0, of_block), block)
    groups = heads // key.shape[1]
    of_key, of_value = (
        torch.unflatten(tensor, 1, (-1, groups)).sum(2).to(like.dtype)
        for tensor, like in ((of_key, key), (of_value, value))
    )
    return of_query, of_key, of_value
