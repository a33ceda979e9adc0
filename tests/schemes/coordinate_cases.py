"""Tokens on several axes, and what rotations of them compute."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.schemes import BuildContext, Positions, QueryKeyMap, SchemeConfig
from hf_posenc.schemes.logits import positional_logits

HEADS, HEAD_DIM, LENGTH, WIDTH = 4, 16, 20, 5


def context(head_dim: int = HEAD_DIM, key_heads: int = HEADS) -> BuildContext:
    return BuildContext(HEADS * head_dim, HEADS, head_dim, causal=False, num_key_value_heads=key_heads)


def map_of(config: SchemeConfig, head_dim: int = HEAD_DIM, key_heads: int = HEADS) -> QueryKeyMap:
    torch.manual_seed(3)
    part = config.build(context(head_dim, key_heads)).query_key_map
    assert part is not None
    return part


def query_and_key(head_dim: int = HEAD_DIM, key_heads: int = HEADS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(1, HEADS, length, head_dim, generator=generator),
        torch.randn(1, key_heads, length, head_dim, generator=generator),
    )


def at(coordinates: Tensor) -> Positions:
    """Tokens at `(axes, batch, length)`."""
    ids = torch.arange(coordinates.shape[-1]).unsqueeze(0)
    return Positions(ids, ids[:, -1:] + 1, coordinates)


def plain(length: int = LENGTH) -> Positions:
    ids = torch.arange(length).unsqueeze(0)
    return Positions(ids, ids[:, -1:] + 1)


def mapped(part: QueryKeyMap, positions: Positions, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    phases = part.phases(positions)
    return part.map_query(query, phases), part.map_key(key, phases)


def logits_of(config: SchemeConfig, positions: Positions, query: Tensor, key: Tensor) -> Tensor:
    torch.manual_seed(3)
    return positional_logits(config.build(context(query.shape[-1], key.shape[1])), query, key, positions)


def scattered(axes: int) -> Tensor:
    """`(axes, 1, LENGTH)` of places in no order."""
    generator = torch.Generator().manual_seed(axes)
    return torch.randint(0, 30, (axes, 1, LENGTH), generator=generator)
