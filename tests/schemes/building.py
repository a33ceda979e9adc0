"""Schemes built in the small setting of the tests, tokens for them, and their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes import AttentionPairs, BuildContext, Positions, SchemeConfig, SchemeParts
from hf_posenc.schemes.logits import positional_logits

from .table.row import HEAD_DIM, HEADS, HIDDEN, KEY_VALUE_HEADS, MAX_POSITIONS

PLACE = BuildContext(HIDDEN, HEADS, HEAD_DIM, max_positions=MAX_POSITIONS, num_key_value_heads=KEY_VALUE_HEADS)


def build(config: SchemeConfig, training: bool = False, seed: int = 0, **changes: Any) -> SchemeParts:
    """The parts of a config; `changes` are properties of another place."""
    torch.manual_seed(seed)
    parts = config.build(dataclasses.replace(PLACE, **changes))
    for part in parts:
        part.train(training)
    return parts


def part_of(config: SchemeConfig, **changes: Any) -> Any:
    """The only part of a config."""
    (part,) = build(config, **changes)
    return part


def redraw(module: torch.nn.Module, std: float = 0.5) -> None:
    """Weights that are large enough to be seen."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)


def at(ids: Any, lengths: Any = None) -> Positions:
    """Tokens at these positions, of one sequence or of a batch."""
    ids = torch.atleast_2d(torch.as_tensor(ids))
    return Positions(ids, ids.amax(-1, keepdim=True) + 1 if lengths is None else torch.as_tensor(lengths))


def counted(length: int) -> Positions:
    """Tokens at 0, 1, 2, ..."""
    return at(torch.arange(length))


LENGTH = 14
#: The tokens of a test that names no others.
TOKENS = counted(LENGTH)


def placed_at(coordinates: Tensor) -> Positions:
    """Tokens at `(axes, batch, length)`."""
    return dataclasses.replace(counted(coordinates.shape[-1]), coordinates=coordinates)


def image(*size: int, prefix: int = 0, shift: tuple[int, ...] | None = None, sized: bool = True) -> Positions:
    """The positions of one image, after `prefix` tokens without a place; `shift` moves all places."""
    axes = [torch.arange(length) + by for length, by in zip(size, shift or (0,) * len(size), strict=True)]
    coordinates = torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")])
    coordinates = torch.nn.functional.pad(coordinates, (prefix, 0)).unsqueeze(1)
    tokens = counted(coordinates.shape[-1])
    extents = torch.tensor(size).view(-1, 1, 1).expand_as(coordinates)
    return Positions(
        tokens.ids, tokens.lengths, coordinates, extents=extents if sized else None, placed=tokens.ids >= prefix
    )


def random_heads(
    length: int, num_heads: int = HEADS, num_key_value_heads: int = KEY_VALUE_HEADS, head_dim: int = HEAD_DIM
) -> tuple[Tensor, Tensor]:
    """Queries and keys of normally distributed numbers."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(1, num_heads, length, head_dim, generator=generator),
        torch.randn(1, num_key_value_heads, length, head_dim, generator=generator),
    )


def mapped(part: Any, positions: Positions, heads: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Queries and keys as a map turns them."""
    query, key = random_heads(positions.ids.shape[-1]) if heads is None else heads
    phases = part.phases(positions)
    return part.map_query(query, phases), part.map_key(key, phases)


def logits_of(scheme: SchemeConfig | SchemeParts, positions: Positions = TOKENS, **changes: Any) -> Tensor:
    """The logits of random queries and keys."""
    parts = build(scheme, **changes) if isinstance(scheme, SchemeConfig) else scheme
    return positional_logits(parts, *random_heads(positions.ids.shape[-1]), positions)


def pairs_at(positions: Positions, slots: Any = None, heads: tuple[Tensor, Tensor] | None = None) -> AttentionPairs:
    """The inputs of a bias: random queries, of all tokens or of those in `slots`, and the keys of all tokens."""
    query, key = random_heads(positions.ids.shape[-1]) if heads is None else heads
    slots = torch.arange(positions.ids.shape[-1]) if slots is None else torch.as_tensor(slots)
    return AttentionPairs(query[:, :, slots], key, slots, positions, query.shape[-1] ** -0.5)
