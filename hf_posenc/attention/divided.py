"""Attention whose first keys have other queries and keys: two calls of a flash kernel instead of a bias for every pair.

A flash kernel also returns the logarithm of the sum of its weights, so results over different keys can be joined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.block_attention import autocast_inputs, for_each_query_head, without_autocast
from hf_posenc.attention.blockwise import SIZES, additive_mask
from hf_posenc.schemes.parts import OtherHeads

aten = torch.ops.aten


def divided_attention(query: Tensor, key: Tensor, value: Tensor, other: OtherHeads, scaling: float) -> Tensor:
    """Causal attention of all tokens of a text on a CPU, without gradients.

    Args:
        query: `(batch, heads, length, head_dim)`.
        key: `(batch, key_value_heads, length, head_dim)`.
        value: `(batch, key_value_heads, length, head_dim)`.
        other: the queries and keys for the first keys of each query.
        scaling: factor of `query . key`.

    Returns:
        `(batch, length, heads, head_dim)`, in the dtype of the query.
    """
    query, key, value, other_query, other_key = autocast_inputs(query, key, value, other.query, other.key)
    other_query, other_key = other_query.to(query.dtype), other_key.to(key.dtype)
    key, value, other_key = (for_each_query_head(each, query.shape[1]) for each in (key, value, other_key))
    output = query.new_empty(query.shape[0], query.shape[2], *query.shape[1::2])
    slots = torch.arange(query.shape[2])
    with without_autocast(query.device):
        for rows in slots.split(SIZES[True].long_distance_rows):
            start, stop = int(rows[0]), int(rows[-1]) + 1
            counts = other.key_counts[start:stop].unsqueeze(-1)
            fewest, most = int(counts.min()), int(counts.max())
            starts = other.near_starts[start:stop].unsqueeze(-1)
            nearest = int(starts.min())
            nearest_heads = query[:, :, start:stop], key[:, :, nearest:stop], value[:, :, nearest:stop]
            near = slots[nearest:stop]
            visible = (near >= starts) & (near <= rows.unsqueeze(-1))
            parts = [_part(*nearest_heads, additive_mask(visible, query.dtype), scaling)]
            for first, last in ((0, fewest), (fewest, most)):
                if first < last:
                    far = other_query[:, :, start:stop], other_key[:, :, first:last], value[:, :, first:last]
                    mask = None if last == fewest else additive_mask(slots[first:last] < counts, query.dtype)
                    parts.append(_part(*far, mask, scaling))
            output[:, start:stop] = _joined(parts).transpose(1, 2)
    return output


def _part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """The result over some keys, and the logarithm of the sum of their weights, `(batch, heads, rows)`."""
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scaling)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][0]
    shares = torch.stack([weight for _, weight in parts]).softmax(0).unsqueeze(-1)
    total = shares[0] * parts[0][0]
    for share, (result, _) in zip(shares[1:], parts[1:], strict=True):
        total = torch.addcmul(total, share, result.to(total.dtype))
    return total
