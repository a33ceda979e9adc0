"""Biases that are a function of distance, from one vector per head to what a kernel can take.

A distance bias is a Toeplitz matrix: entry (query i, key j) depends on `j - i` only. So the scheme is evaluated on
the `query_len + key_len - 1` distances that occur, never on `query_len x key_len` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.schemes.parts import LogitBias


def first_key_slot(offset: int | Tensor, query_length: int, key_length: int) -> int | Tensor:
    """The slot of the first key that reached the attention function.

    Dynamic caches hand over every slot; static ones too, padded at the end; sliding ones only the last
    `key_length` slots up to the newest query.
    """
    start = offset + query_length - key_length
    if isinstance(start, Tensor):
        return start.clamp(min=0)
    return max(start, 0)


def dense_bias(
    bias: LogitBias, offset: int | Tensor, query_length: int, key_length: int, device: torch.device
) -> Tensor:
    """`(1, heads, query_len, key_len)` float32.

    Args:
        bias: the scheme's part.
        offset: slot of the first query.
        query_length: number of queries.
        key_length: number of keys.
        device: where the result lives.
    """
    nearest = first_key_slot(offset, query_length, key_length) - offset - (query_length - 1)
    distances = torch.arange(query_length + key_length - 1, device=device) + nearest
    per_distance = bias(distances)
    # Window w holds the distances of query `query_length - 1 - w`, hence the flip.
    return per_distance.unfold(-1, key_length, 1).flip(-2).unsqueeze(0)
