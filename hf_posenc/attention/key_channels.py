"""Numbers that travel with a key through whatever cache a model uses.

A scheme may need something of every past token beside its key (a forget gate, for one). A cache knows two tensors, and
reorders, crops, offloads and slides them. So the numbers are appended to the key as further channels on its way into
the cache, and cut off again on its way out. In bfloat16 and float16 each number becomes the sum of three channels,
which together keep the digits of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channels_per_number(dtype: torch.dtype) -> int:
    """How many channels of a dtype hold one float32."""
    return 1 if dtype in (torch.float32, torch.float64) else 3


def append_features(key: Tensor, features: Tensor) -> Tensor:
    """Keys with features as further channels.

    Args:
        key: `(batch, key_value_heads, length, width)`.
        features: `(batch, heads, length, num_features)` float32; `heads` is a multiple of `key_value_heads`.

    Returns:
        `(batch, key_value_heads, length, width + channels)` in the dtype of the key.
    """
    batch, _, length, _ = features.shape
    if length == 1:
        grouped = features.reshape(batch, key.shape[1], 1, -1)
    else:
        grouped = features.unflatten(1, (key.shape[1], -1)).transpose(2, 3).flatten(3)
    channels = [grouped.to(key.dtype)]
    rest = grouped
    for _ in range(channels_per_number(key.dtype) - 1):
        rest = rest - channels[-1].float()
        channels.append(rest.to(key.dtype))
    return torch.cat((key, *channels), dim=-1)


def split_features(key: Tensor, num_heads: int, num_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of `append_features`: `(batch, key_value_heads, length, width)` and `(batch, heads, length, n)`."""
    per_key = num_heads // key.shape[1] * num_features
    count = channels_per_number(key.dtype)
    plain, channels = torch.split_with_sizes(key, [key.shape[-1] - count * per_key, count * per_key], dim=-1)
    if count > 1:
        channels = channels.float().unflatten(-1, (count, per_key)).sum(-2)
    if num_features > 1:
        channels = channels.unflatten(-1, (-1, num_features))
    features = channels.transpose(2, 3).reshape(key.shape[0], num_heads, key.shape[2], num_features)
    return plain, in_float32(features)


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor as float32. Asked in every layer of a decoding step, where a call that changes nothing is not free."""
    return tensor if tensor.dtype == torch.float32 else tensor.float()
