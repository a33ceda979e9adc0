"""Stores numbers per key in the model's cache, as additional channels of the keys.

A scheme may need numbers of every past token in addition to its key (for example forget gates). A cache has two
tensors, and reorders, crops, offloads and slides them. So the numbers are appended to the keys as additional channels
when they enter the cache, and removed when they are read. In bfloat16 and float16 each number is split into a sum of
three channels, which together keep the precision of float32. The channels are padded to whole units of 16 bytes: the
kernels of GPUs read keys in such units, also where keys are a view of what the cache holds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Size of a unit, in bytes.
_UNIT = 16
#: Channels that store a float32 number.
_CHANNELS = {torch.float64: 1, torch.float32: 1, torch.bfloat16: 3, torch.float16: 3}


def num_channels(numbers: int, dtype: torch.dtype) -> int:
    """Returns the number of channels of a dtype that store some float32 numbers, including padding."""
    in_unit = _UNIT // dtype.itemsize
    return -(-numbers * _CHANNELS[dtype] // in_unit) * in_unit


def append_features(key: Tensor, features: Tensor) -> Tensor:
    """Appends features to keys as additional channels.

    Args:
        key: `(batch, key_value_heads, length, width)`.
        features: `(batch, heads, length, num_features)` float32. `heads` is a multiple of `key_value_heads`, or, if the
            architecture has repeated its keys, a divisor of it.

    Returns:
        `(batch, key_value_heads, length, width + channels)` in the dtype of the key.
    """
    batch, heads, length, _ = features.shape
    if heads < key.shape[1]:
        features = features.repeat_interleave(key.shape[1] // heads, dim=1)
    if features.shape[1] == key.shape[1]:
        grouped = features
    elif length == 1:
        grouped = features.reshape(batch, key.shape[1], 1, -1)
    else:
        grouped = torch.unflatten(features, 1, (key.shape[1], -1)).transpose(2, 3).flatten(3)
    channels = [grouped.to(key.dtype)]
    rest = grouped
    for _ in range(_CHANNELS[key.dtype] - 1):
        rest = rest - channels[-1].float()
        channels.append(rest.to(key.dtype))
    numbers = grouped.shape[-1]
    missing = -numbers * len(channels) % (_UNIT // key.dtype.itemsize)
    if missing % numbers:
        channels[-1] = nn.functional.pad(channels[-1], (0, missing))
    else:
        channels += channels[-1:] * (missing // numbers)  # Any number will do, and there is no operator for it.
    return torch.cat((key, *channels), dim=-1)


def split_features(key: Tensor, num_heads: int, num_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of `append_features`.

    Args:
        key: keys with features.
        num_heads: number of heads that have features.
        num_features: number of features of each of them.

    Returns:
        `(batch, key_value_heads, length, width)` in the dtype of the key, and `(batch, num_heads, length,
        num_features)` float32.
    """
    per_key, count = max(1, num_heads // key.shape[1]) * num_features, _CHANNELS[key.dtype]
    used, added = count * per_key, num_channels(per_key, key.dtype)
    # One operator for all views.
    key, channels, _ = key.split_with_sizes([key.shape[-1] - added, used, added - used], dim=-1)
    if count > 1:
        channels = torch.unflatten(channels.float(), -1, (count, per_key)).sum(-2)
    if num_heads == key.shape[1]:
        return key, channels.float()
    if num_heads < key.shape[1]:
        channels = channels[:, :: key.shape[1] // num_heads]
    if num_features > 1:
        channels = torch.unflatten(channels, -1, (-1, num_features))
    return key, channels.transpose(2, 3).reshape(key.shape[0], num_heads, key.shape[2], num_features).float()
