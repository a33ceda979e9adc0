"""A scheme that is given other positions than the tokens have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_posenc.schemes.arrangement.schedule import check_not_layered
from hf_posenc.schemes.config import BuildContext, OuterConfig, SchemeConfig
from hf_posenc.schemes.logits import pairwise_bias
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
from hf_posenc.schemes.reach import Reach, shortest
from hf_posenc.schemes.registry import as_scheme
from hf_posenc.schemes.rotary.rope import RopeConfig

PartType = TypeVar("PartType", bound=Part)


class PositionMap(nn.Module):
    """Positions -> other positions, one token at a time."""

    #: True where the new position of a token depends on how long the sequence has become since (`Part`).
    length_dependent: bool = False
    #: True where it depends on the tokens before it, which no cache keeps (`Part`).
    needs_whole_sequence: bool = False
    #: Whether other positions make other ones of it; a map that goes by the order of tokens alone does not.
    reads_positions: bool = True
    #: True where the positions it is given have to be whole numbers.
    whole_positions: bool = False
    #: True where all tokens are as far apart as before, so that a bias of distance is what it was.
    keeps_distances: bool = False
    #: How long a sequence it can give positions to; without a limit by default.
    length_reach: Reach = Reach()

    @property
    def gives_real_positions(self) -> bool:
        """Whether it may make real numbers of whole ones."""
        return False

    def last_position(self, last: int) -> int | None:
        """The greatest position it may give to tokens at positions up to `last`; `None` where that is not known."""
        return None

    def forward(self, positions: Positions) -> Tensor:
        """Returns the new ids, `(batch or 1, length)`, int64 or float32; padding stays negative."""
        raise NotImplementedError

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to extend a cache whose tokens stand elsewhere by now.

        Raises:
            UnsupportedError: for such a cache.
        """

    def renumber(self, positions: Positions) -> Positions:
        """The same tokens at their new positions; coordinates are mapped axis by axis, lengths still count tokens."""
        coordinates = positions.coordinates
        if coordinates is not None:
            axes = [dataclasses.replace(positions, ids=axis, coordinates=None) for axis in coordinates.unbind(0)]
            coordinates = torch.stack([self(axis) for axis in axes])
        return dataclasses.replace(positions, ids=self(positions), coordinates=coordinates)


class _MappedPart(Part, Generic[PartType]):
    """What parts under a position map have in common.

    Args:
        position_map: maps the positions.
        inner: the part that gets them.
    """

    def __init__(self, position_map: PositionMap, inner: PartType) -> None:
        super().__init__()
        self.position_map = position_map
        self.inner = inner
        take_declarations(self, inner)
        self.length_reach = shortest((position_map.length_reach, inner.length_reach.under(position_map.last_position)))
        self.length_dependent = inner.length_dependent or position_map.length_dependent
        self.needs_whole_sequence = inner.needs_whole_sequence or position_map.needs_whole_sequence
        self.reads_positions = inner.reads_positions and position_map.reads_positions

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses where the map or the part does."""
        self.position_map.check_cache(cached_length, total_length)
        self.inner.check_cache(cached_length, total_length)

    def adopt(self, native: Tensor) -> bool:
        """Hands the native weight on."""
        return self.inner.adopt(native)


class MappedEncoding(_MappedPart[AdditiveEncoding], AdditiveEncoding):
    """An additive encoding of the mapped positions."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length, hidden)`."""
        return cast("Tensor", self.inner(self.position_map.renumber(positions)))


class MappedQueryKeyMap(_MappedPart[QueryKeyMap], QueryKeyMap):
    """A query-key map that goes by the mapped positions."""

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the phases of the inner map."""
        return self.inner.phases(self.position_map.renumber(positions))

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """As the inner map has them."""
        return self.inner.prepared(phases, dtype)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, heads, length, head_dim)`, as the inner map has it."""
        return self.inner.map_query(query, phases)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, key_value_heads, length, head_dim)`, as the inner map has it."""
        return self.inner.map_key(key, phases)


class MappedBias(_MappedPart[LogitBias], PairwiseBias):
    """A logit bias of the mapped positions. Their distances no longer repeat, so it is evaluated for every pair."""

    def __init__(self, position_map: PositionMap, inner: LogitBias) -> None:
        super().__init__(position_map, inner)
        # A map may place a token by all that is there: randomized positions are drawn for the last one.
        self.reads_later_keys = True
        # It counts other positions than the tokens have.
        self.zero_within = 0

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """`(batch, heads, length, num_features)` of the inner bias."""
        return cast("PairwiseBias", self.inner).key_features(hidden_states)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        return pairwise_bias(self.inner, dataclasses.replace(pairs, keys=self.position_map.renumber(pairs.keys)))


class MappedScale(_MappedPart[LogitScale], LogitScale):
    """A logit scale that goes by the mapped positions."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads or 1, length)` in float32."""
        return cast("Tensor", self.inner(self.position_map.renumber(positions)))


def map_parts(position_map: PositionMap, parts: SchemeParts, option: str, scheme: SchemeConfig) -> SchemeParts:
    """The same parts, at the mapped positions.

    Args:
        position_map: maps the positions.
        parts: of a scheme, at least one.
        option: the option that names the scheme, for errors.
        scheme: the scheme.

    Raises:
        ValueError: if the scheme goes by the order of tokens, so that other positions change nothing; or if it needs
            whole positions and the map may give real ones.
    """
    if not any(part.reads_positions for part in parts):
        raise ValueError(
            f"{option} is {scheme.name!r}, which goes by the order of tokens and not by their positions, so other "
            f"positions would change nothing. Use {scheme.name!r} by itself, or compose it with this scheme."
        )
    if position_map.gives_real_positions and any(needs_whole_positions(part) for part in parts):
        raise ValueError(
            f"{option} is {scheme.name!r}, which needs whole positions, and this map makes real numbers of them. Use a "
            "map that keeps them whole (a whole factor, kind='integer'), or a scheme of real positions such as 'rope', "
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
    """Whether a part, or anything in it, refuses positions that are real numbers."""
    return any(module.whole_positions for module in part.modules() if isinstance(module, Part | PositionMap))


def nested_scheme(config: SchemeConfig, option: str) -> None:
    """Turns an option into the config of a scheme for one layer, from any form a scheme can be given in.

    Raises:
        UnknownNameError: for an unknown scheme or option of it.
        ValueError: for anything else, and for a scheme that differs between layers.
    """
    value: Any = as_scheme(getattr(config, option), f"{type(config).__name__}.{option}")
    check_not_layered(f"{type(config).__name__}.{option}", value)
    object.__setattr__(config, option, value)


@dataclass(frozen=True)
class PositionMapConfig(OuterConfig):
    """Base of the configs that give a scheme other positions.

    All parts of the scheme get the mapped positions, a logit scale too: to leave one at the tokens' own positions,
    compose it with the map instead of putting it under the map. Lengths still count tokens. What goes by the order of
    tokens instead of by their positions, such as the gates of `forget_gate`, is not changed by any map, and refused
    where there is nothing else to map.

    Args:
        inner: the scheme that gets them: a config, a name, or the dictionary of a config.
    """

    inner: SchemeConfig = field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        nested_scheme(self, "inner")

    def position_map(self) -> PositionMap:
        """A new map."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme under the map.

        Raises:
            ValueError: if the scheme has no parts, cannot be built here, or does not go with the mapped positions.
        """
        parts = self.inner.build(context)
        if not list(parts):
            raise ValueError(
                f"{type(self).__name__}.inner is {self.inner.name!r}, which encodes no positions, so there is "
                f"nothing to map. Use {self.inner.name!r} itself."
            )
        return map_parts(self.position_map(), parts, f"{type(self).__name__}.inner", self.inner)
