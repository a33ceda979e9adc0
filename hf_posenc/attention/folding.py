"""Folds a number per key into additional dimensions of queries and keys.

`q . k + term[j] - term[i]` is itself a product of two vectors, so any kernel can compute it, including flash kernels
without a bias, and the kernel's backward pass applies. Terms grow with the length, and adding a large term in float32
would lose precision of the content. Two measures prevent this. The new dimensions come first, so that the two terms
cancel first if a product is summed in order. In float32 the kernel's scaling is a power of two, so a division is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: The part of a term that the other factor holds. It is a power of two, so the division is exact. float16 ends at
#: 65504, which with this factor is a term of 33 million at a scaling of 1/8.
_SHARE = 4096.0


def fold(
    query: Tensor, key: Tensor, terms: Tensor, query_slots: Tensor, scaling: float
) -> tuple[Tensor, Tensor, float]:
    """Extends queries and keys so that their products include `term[j] - term[i]`.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        terms: `(batch or 1, heads, key_len)` float32.
        query_slots: `(query_len,)` int64, the key of each query's own token.
        scaling: the factor of `query . key`.

    Returns:
        Both with the same `width > head_dim`, and the factor by which the kernel must multiply their products.
    """
    batch, heads = query.shape[:2]
    if query.dtype in (torch.float32, torch.float64):
        # Queries absorb the rest of the scaling. In half precision this would round them.
        fraction, exponent = math.frexp(scaling)
        scaling = math.ldexp(1.0, exponent - 1)
        query = query if fraction == 0.5 else query * (2 * fraction)
    groups = heads // key.shape[1]
    scaled = (terms / (scaling * _SHARE)).expand(batch, -1, -1)
    # All logits of a query are shifted equally, which does not change the softmax, so there is no gradient.
    shift = scaled.detach().index_select(-1, query_slots)
    of_keys = _split(scaled, key.dtype)
    of_queries = [-part for part in _split(shift, query.dtype)]
    # Several query heads with different terms share a key head. It has separate dimensions for each of them.
    shares = _SHARE * torch.eye(groups, dtype=query.dtype, device=query.device).repeat(key.shape[1], 1)
    chosen = shares.repeat(1, len(of_keys)).view(1, heads, 1, -1).expand(batch, -1, query.shape[2], -1)
    channels = torch.cat([torch.unflatten(part, 1, (-1, groups)).transpose(2, 3) for part in of_keys], dim=-1)
    ones = key.new_full((1,), _SHARE).expand(*key.shape[:-1], len(of_queries))
    wide_query = torch.cat((chosen, torch.stack(of_queries, dim=-1), query), dim=-1)
    wide_key = torch.cat((channels, ones, key), dim=-1)
    # Accelerators need a head width that is a multiple of 8.
    rest = 0 if query.device.type == "cpu" else -wide_query.shape[-1] % 8
    width = wide_query.shape[-1] + rest
    return _padded(wide_query, width), _padded(wide_key, width), scaling


def attend_with_wide_values(
    attend: Callable[..., Any],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls an attention function with heads of equal width, which fast kernels require."""
    output, *rest = attend(module, *of_one_width(query, key, value), *args, **kwargs)
    # Models reshape the heads of a token to one axis.
    return output[..., : value.shape[-1]].contiguous(), *rest


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pads queries, keys and values with zeros to the same width. The result of attention has that width too."""
    width = max(query.shape[-1], value.shape[-1])
    return _padded(query, width), _padded(key, width), _padded(value, width)


def _padded(tensor: Tensor, width: int) -> Tensor:
    """Pads the last axis with zeros to `width`. `pad` copies the tensor even if no padding is needed."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def _split(terms: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Splits `terms` into parts in `dtype` with the same sum, the largest first; one of them carries the gradient."""
    if dtype in (torch.float32, torch.float64):
        return (terms.to(dtype),)
    first = terms.to(dtype)
    rest = terms.detach() - first.detach().float()
    second = rest.to(dtype)
    return first, second, (rest - second.float()).to(dtype)
