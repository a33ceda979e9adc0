"""Schemes with mapped positions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hf_posenc.schemes.arrangement.schedule import nested_scheme
from hf_posenc.schemes.config import BuildContext, OuterConfig, SchemeConfig
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.outer_parts import OuterPart, PartType
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    SchemeParts,
    take_declarations,
)
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.reach import shortest
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.validation import option


class PositionMap(Part):
    """A map from positions to new positions, one per token. Its flags say of its positions what those of a part do."""

    #: Whether all distances stay the same, so that a distance bias does not change.
    keeps_distances: bool = False
    #: Whether it may map integers to real numbers.
    gives_real_positions: bool = False

    def last_position(self, last: int) -> int | None:
        """The greatest new position of tokens at positions up to `last`; `None` if unknown."""
        return None

    def forward(self, positions: Positions) -> Tensor:
        """Returns the new ids, `(batch or 1, length)`, int64 or float32; padding stays negative."""
        raise NotImplementedError

    def renumber(self, positions: Positions) -> Positions:
        """The same tokens with new positions. Coordinates are mapped axis by axis; lengths still count tokens.

        The size of a grid is then unknown, because the map says where tokens are and not where they could be.
        """
        coordinates = positions.coordinates
        if coordinates is not None:
            axes = [dataclasses.replace(positions, ids=axis, coordinates=None) for axis in coordinates.unbind(0)]
            coordinates = torch.stack([self(axis) for axis in axes])
        ids = self(positions)
        return dataclasses.replace(positions, ids=ids, coordinates=coordinates, extents=None, grid=None)


class _MappedPart(OuterPart[PartType]):
    """Base class of parts that receive mapped positions."""

    def __init__(self, position_map: PositionMap, inner: PartType) -> None:
        super().__init__()
        self.position_map = position_map
        self.inner = inner
        take_declarations(self, inner)
        self.length_reach = shortest((position_map.length_reach, inner.length_reach.under(position_map.last_position)))
        self.length_dependent = inner.length_dependent or position_map.length_dependent
        self.needs_whole_sequence = inner.needs_whole_sequence or position_map.needs_whole_sequence
        self.reads_positions = inner.reads_positions and position_map.reads_positions

    def members(self) -> tuple[Part, ...]:
        """The map and the part."""
        return self.position_map, self.inner

    def forward(self, positions: Any) -> Tensor:
        """Returns what the part returns for the mapped positions."""
        return cast("Tensor", self.inner(self.position_map.renumber(positions)))


class MappedEncoding(_MappedPart[AdditiveEncoding], AdditiveEncoding):
    """An additive encoding of the mapped positions."""


class MappedQueryKeyMap(_MappedPart[QueryKeyMap], QueryKeyMap):
    """A query-key map at the mapped positions."""

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the phases of the inner map."""
        return self.inner.phases(self.position_map.renumber(positions))

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the prepared inputs of the inner map."""
        return self.inner.prepared(phases, dtype)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """Maps a query `(batch, heads, length, head_dim)` with the inner map."""
        return self.inner.map_query(query, phases)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """Maps a key `(batch, key_value_heads, length, head_dim)` with the inner map."""
        return self.inner.map_key(key, phases)


class MappedBias(_MappedPart[LogitBias], PairwiseBias):
    """A logit bias of the mapped positions, evaluated for every pair because distances are no longer regular."""

    def __init__(self, position_map: PositionMap, inner: LogitBias) -> None:
        super().__init__(position_map, inner)
        # A map may depend on later tokens: randomized positions are drawn for the last position.
        self.reads_later_keys = True
        # `zero_within` of the inner bias refers to mapped positions.
        self.zero_within = 0

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the features of the inner bias."""
        return cast("PairwiseBias", self.inner).key_features(hidden_states)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        return pairwise_bias(self.inner, dataclasses.replace(pairs, keys=self.position_map.renumber(pairs.keys)))


class MappedScale(_MappedPart[LogitScale], LogitScale):
    """A logit scale at the mapped positions."""


def map_parts(position_map: PositionMap, parts: SchemeParts, option: str, scheme: SchemeConfig) -> SchemeParts:
    """Applies a position map to the parts of a scheme.

    Args:
        position_map: maps the positions.
        parts: the parts of the scheme, at least one.
        option: the option that holds the scheme, for error messages.
        scheme: the scheme.

    Raises:
        ValueError: if the scheme depends only on the order of tokens, so that the map has no effect; or if it needs
            integer positions and the map may produce real ones.
    """
    if not any(part.reads_positions for part in parts):
        raise ValueError(
            f"{option} is {scheme.name!r}, which depends on the order of tokens and not on their positions, so mapping "
            f"positions has no effect. Use {scheme.name!r} itself, or compose it with this scheme."
        )
    modules = [module for part in parts for module in part.modules()]
    if any(isinstance(module, PairwiseBias) and module.needs_oldest_keys for module in modules):
        raise ValueError(
            f"{option} contains a scheme that combines neighbouring tokens of one document, and changed positions do "
            "not show where documents begin. Compose that scheme with this one instead of nesting it."
        )
    if position_map.gives_real_positions and any(needs_whole_positions(part) for part in parts):
        raise ValueError(
            f"{option} is {scheme.name!r}, which needs integer positions, but this map produces real ones. Use a map "
            "to integers (an integer factor, kind='integer'), or a scheme that accepts real positions, such as 'rope', "
            "'alibi' or 'sinusoidal'."
        )
    additive, query_key_map = parts.additive, parts.query_key_map
    bias, scale = parts.logit_bias, parts.logit_scale
    if bias is not None and not (position_map.keeps_distances and isinstance(bias, DistanceBias)):
        bias = MappedBias(position_map, bias)
    return SchemeParts(
        additive=None if additive is None else MappedEncoding(position_map, additive),
        query_key_map=None if query_key_map is None else MappedQueryKeyMap(position_map, query_key_map),
        logit_bias=bias,
        logit_scale=None if scale is None else MappedScale(position_map, scale),
    )


def needs_whole_positions(part: Part) -> bool:
    """Whether a part, or any module in it, needs integer positions."""
    return any(module.whole_positions for module in part.modules() if isinstance(module, Part))


@dataclass(frozen=True)
class PositionMapConfig(OuterConfig):
    """Base class of configs that map the positions of a scheme.

    All parts of the scheme get the mapped positions, including a logit scale. To keep a part at the original positions,
    compose it with the map instead of nesting it in the map. Lengths still count tokens. Schemes that depend on the
    order of tokens instead of their positions, such as the gates of `forget_gate`, are not affected by a map, and are
    refused if there is nothing else to map.

    Args:
        inner: the scheme that gets the mapped positions: a config, a name, or the dictionary of a config.
    """

    inner: SchemeConfig = option(RopeConfig, nested_scheme)

    def position_map(self) -> PositionMap:
        """Returns a new map."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme with mapped positions.

        Raises:
            ValueError: if the scheme has no parts, cannot be built here, or does not support the mapped positions.
        """
        parts = self.inner.build(context)
        if not list(parts):
            raise ValueError(
                f"{type(self).__name__}.inner is {self.inner.name!r}, which encodes no positions, so there is "
                f"nothing to map. Use {self.inner.name!r} itself."
            )
        return map_parts(self.position_map(), parts, f"{type(self).__name__}.inner", self.inner)
