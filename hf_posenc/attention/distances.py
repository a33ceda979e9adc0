"""Distance biases: builds the form of a bias from one vector per head.

A distance bias is a Toeplitz matrix: entry (query i, key j) depends on `j - i` only. So the scheme is evaluated on the
`query_len + key_len - 1` distances that occur, not on `query_len x key_len` pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.forms import DistanceForm
from hf_posenc.schemes.parts import DistanceBias


def first_key_slot(offset: int | Tensor, query_length: int, key_length: int) -> int | Tensor:
    """Returns the slot of the first key that reached the attention function.

    Dynamic caches return every slot; static caches too, padded at the end; sliding caches only the last `key_length`
    slots up to the newest query.
    """
    start = offset + query_length - key_length
    if isinstance(start, Tensor):
        return start.clamp(min=0)
    return max(start, 0)


def distance_form(
    bias: DistanceBias, offset: int | Tensor, query_length: int, key_length: int, device: torch.device
) -> DistanceForm:
    """Evaluates a bias at every distance that occurs.

    Args:
        bias: the scheme's part.
        offset: slot of the first query.
        query_length: number of queries.
        key_length: number of keys.
        device: device of the result.
    """
    farthest = first_key_slot(offset, query_length, key_length) - offset - (query_length - 1)
    distances = torch.arange(query_length + key_length - 1, device=device) + farthest
    # Torch's fused kernels refuse a mask whose rows are not contiguous. Tables give one number per head for a distance.
    vector = bias(distances).contiguous()
    return DistanceForm(vector, query_length, key_length, bias.slopes_behind(device))
