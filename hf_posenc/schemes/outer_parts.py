"""Parts that consist of others: weighted sums, products and chains of parts of one kind, also at other positions."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_posenc.schemes.features import joined_features, pairs_of_parts
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    PositionMap,
    QueryKeyMap,
    Reach,
    feature_counts,
    shortest,
)
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.rotary.rope import RotaryMap

PartType = TypeVar("PartType", bound=Part)


class OuterPart(Part, Generic[PartType]):
    """Base class of parts that consist of others. It declares what they do together.

    Args:
        parts: the parts by their names in the state dict, `None` for one that is missing; or a list of parts, which are
            called `parts.0`, `parts.1`, ...
        position_map: maps the positions that the parts receive.
        strength: for a blend of the parts "old" and "new", which have the weights `1 - strength` and `strength`,
            between 0 and 1. Otherwise all weights are 1.
    """

    def __init__(
        self,
        parts: Mapping[str, PartType | None] | Sequence[PartType],
        position_map: PositionMap | None = None,
        strength: float | None = None,
    ) -> None:
        super().__init__()
        self.position_map = position_map
        self.strength = strength
        self._names = tuple(parts) if isinstance(parts, Mapping) else ()
        if isinstance(parts, Mapping):
            for name, part in parts.items():
                self.add_module(name, part)
        else:
            self.parts = nn.ModuleList(parts)
        self._declare()

    def members(self) -> list[PartType]:
        """The parts that are not missing."""
        parts = [self._modules[name] for name in self._names] if self._names else self.parts
        return [cast("PartType", part) for part in parts if part is not None]

    def terms(self) -> list[tuple[PartType, float]]:
        """The parts that are computed, with their weights."""
        if self.strength is None:
            return [(part, 1.0) for part in self.members()]
        weights = {"old": 1.0 - self.strength, "new": self.strength}
        # The new part is computed even at strength 0, so that its parameters have gradients (zeros) from the first step
        # on, which DDP and resumed optimizers need.
        present = (name for name in self._names if self._modules[name] is not None)
        computed = [name for name in present if weights[name] or name == "new"]
        return [(cast("PartType", self._modules[name]), weights[name]) for name in computed]

    def total(self, value: Callable[[PartType], Tensor]) -> Tensor:
        """The weighted sum of the values of the parts; a weight of 1 costs nothing."""
        # If only an old part is left at strength 1, it is called too, because zeros need the shape of its value.
        terms = self.terms() or [(part, 0.0) for part in self.members()]
        first, *others = (value(part) if weight == 1 else value(part) * weight for part, weight in terms)
        return sum(others, start=first)

    @property
    def plain(self) -> bool:
        """Whether all weights are 1 and the parts receive the positions of the tokens."""
        return self.strength is None and self.position_map is None

    def summands(self) -> Sequence[PartType]:
        """The parts, if it is a plain sum of biases."""
        return self.members() if self.plain else (cast("PartType", self),)

    def positions_of_parts(self, positions: Positions) -> Positions:
        """The positions that the parts receive."""
        return positions if self.position_map is None else self.position_map.renumber(positions)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Calls `check_cache` of the map and of every part that is computed."""
        for part in (self.position_map, *(part for part, _ in self.terms())):
            if part is not None:
                part.check_cache(cached_length, total_length)

    def adopt(self, native: Tensor) -> bool:
        """Passes the native weight to the first part that accepts it."""
        return any(part.adopt(native) for part in self.members())

    def reach_of(self, part: PartType, weight: float) -> Reach:
        """The longest sequence that a part can encode with a weight."""
        return part.length_reach

    def _declare(self) -> None:
        """Declares any of the flags of the parts, the shortest reach, and the features of all."""
        parts = self.members()
        for kind in type(self).__mro__:
            for name in inspect.get_annotations(kind) if issubclass(kind, Part) else ():
                if isinstance(getattr(kind, name, None), bool):
                    setattr(self, name, any(getattr(part, name, False) for part in parts))
        terms = self.terms() or [(part, 0.0) for part in parts]
        reaches = [self.reach_of(part, weight) for part, weight in terms]
        if self.position_map is not None:
            moved = self.position_map
            self.length_dependent |= moved.length_dependent
            self.needs_whole_sequence |= moved.needs_whole_sequence
            self.reads_positions &= moved.reads_positions
            reaches = [moved.length_reach, *(reach.under(moved.last_position) for reach in reaches)]
        self.length_reach = shortest(reaches)


class SummedEncoding(OuterPart[AdditiveEncoding], AdditiveEncoding):
    """The weighted sum of additive encodings."""

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Calls `check_cache` of the parts. A table is stretched to the last position, and not to the last token."""
        last = None if self.position_map is None else self.position_map.last_position(total_length - 1)
        super().check_cache(cached_length, total_length if last is None else max(total_length, last + 1))

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length, hidden)`."""
        positions = self.positions_of_parts(positions)
        return self.total(lambda part: part(positions))


class SummedDistanceBias(OuterPart[DistanceBias], DistanceBias):
    """The weighted sum of distance biases, which is a distance bias itself."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        return self.total(lambda part: part(distance))


class SummedPairwiseBias(OuterPart[LogitBias], PairwiseBias):
    """The weighted sum of biases that are not all distance biases, or of biases at mapped positions.

    At mapped positions, a bias is evaluated for every pair, because distances are no longer regular.
    """

    def _declare(self) -> None:
        super()._declare()
        counts = [feature_counts(part) for part in self.members()]
        self.num_features = sum(unshared + shared for unshared, shared in counts)
        self.num_shared_features = sum(shared for _, shared in counts)
        if self.position_map is None:
            self.zero_below = min((getattr(part, "zero_below", 0) for part in self.members()), default=0)
        # A map may depend on later tokens: randomized positions are drawn for the last position.
        self.reads_later_keys |= self.position_map is not None

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the features of all biases in one float32 tensor."""
        return joined_features(self.members(), hidden_states)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        if self.position_map is not None:
            pairs = dataclasses.replace(pairs, keys=self.position_map.renumber(pairs.keys))
        parts = self.members()
        received = dict(zip(map(id, parts), pairs_of_parts(parts, pairs), strict=True))
        return self.total(lambda part: pairwise_bias(part, received[id(part)]))


class CombinedScale(OuterPart[LogitScale], LogitScale):
    """The product of logit scales, or the weighted sum of two scales that are blended.

    In a blend, a missing scale counts as 1. Logarithms are not interpolated instead, because a scale may be 0 (SSMax at
    the first token).
    """

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads or 1, length)` in float32."""
        positions = self.positions_of_parts(positions)
        if self.strength is None:
            first, *others = (part(positions) for part in self.members())
            return cast("Tensor", math.prod(others, start=first))
        total = self.total(lambda part: part(positions))
        if len(self.members()) == 2:
            return total
        return total + (self.strength if self._modules["new"] is None else 1.0 - self.strength)


class ChainedMap(OuterPart[QueryKeyMap], QueryKeyMap):
    """Maps one after the other, each at its positions times its weight.

    The angles of two rotations of the same pairs are added. If they are blended, the old map is at positions
    `(1 - strength) * p` and the new one at `strength * p`, which gives one rotation with interpolated frequencies.
    """

    def __init__(
        self,
        parts: Mapping[str, QueryKeyMap | None],
        position_map: PositionMap | None = None,
        strength: float | None = None,
    ) -> None:
        super().__init__(parts, position_map, strength)
        widths = [part.rotary_dim for part in self.members()]
        self.rotary_dim = None if None in widths else max(cast("list[int]", widths))
        self.symmetric = all(part.symmetric for part in self.members())
        self.width_factor = math.prod(part.width_factor for part in self.members())
        self.heads_together = math.lcm(*(part.heads_together for part in self.members()))
        self._counts: list[int] = []
        # Every layer asks in every call. A blend is not asked here, because its strength may change.
        placed = [name for name in self._names if self._modules[name] is not None]
        self._single = placed[0] if strength is None and len(placed) == 1 else None

    def reach_of(self, part: QueryKeyMap, weight: float) -> Reach:
        """The longest sequence of the map at positions times the weight."""
        if self.strength is None:
            return part.length_reach
        scaled = part.length_reach.under(lambda last: math.floor(weight * last))
        return dataclasses.replace(scaled, made_for=part.length_reach.made_for)

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the phases of the maps that are computed, one after the other."""
        positions = self.positions_of_parts(positions)
        self._counts = []
        phases: list[Tensor] = []
        for part, weight in self.terms():
            part_phases = part.phases(scaled_positions(positions, weight))
            # The factor of a rotation (YaRN's temperature) is raised to the power of its weight.
            factor = 1.0 if weight == 1 else _attention_factor(part, positions.lengths) ** (weight - 1)
            unchanged = not isinstance(factor, Tensor) and factor == 1.0
            phases += part_phases if unchanged else [phase * factor for phase in part_phases]
            self._counts.append(len(part_phases))
        return tuple(phases)

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the prepared inputs of a single map, or the phases of several."""
        terms = self.terms()
        return terms[0][0].prepared(phases, dtype) if len(terms) == 1 else phases

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, heads, length, head_dim)`, in the dtype of `query`."""
        if self._single is not None:
            return cast("QueryKeyMap", self._modules[self._single]).map_query(query, phases)
        for part, part_phases in self._with_phases(phases):
            query = part.map_query(query, part_phases)
        return query

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, key_value_heads, length, head_dim)`, in the dtype of `key`."""
        if self._single is not None:
            return cast("QueryKeyMap", self._modules[self._single]).map_key(key, phases)
        for part, part_phases in self._with_phases(phases):
            key = part.map_key(key, part_phases)
        return key

    def _with_phases(self, phases: tuple[Tensor, ...]) -> list[tuple[QueryKeyMap, tuple[Tensor, ...]]]:
        parts = [part for part, _ in self.terms()]
        if len(parts) == 1:
            return [(parts[0], phases)]
        ends = itertools.pairwise(itertools.accumulate(self._counts, initial=0))
        return [(part, phases[start:end]) for part, (start, end) in zip(parts, ends, strict=True)]


def sum_of_biases(
    biases: Mapping[str, LogitBias | None] | Sequence[LogitBias], strength: float | None = None
) -> SummedDistanceBias | SummedPairwiseBias:
    """The sum of several biases, or a blend of "old" and "new"; a distance bias if all of them are."""
    parts = biases.values() if isinstance(biases, Mapping) else biases
    if all(isinstance(bias, DistanceBias | None) for bias in parts):
        return SummedDistanceBias(cast("Any", biases), strength=strength)
    return SummedPairwiseBias(biases, strength=strength)


def scaled_positions(positions: Positions, weight: float) -> Positions:
    """The positions times `weight`; padding stays negative."""
    if weight == 1:
        return positions

    def scaled(ids: Tensor) -> Tensor:
        return (ids.float() * weight).where(ids >= 0, ids.float())

    coordinates = None if positions.coordinates is None else scaled(positions.coordinates)
    return dataclasses.replace(positions, ids=scaled(positions.ids), coordinates=coordinates)


def _attention_factor(part: QueryKeyMap, lengths: Tensor) -> Tensor | float:
    inner: Any = part
    while isinstance(inner, ChainedMap) and len(inner.members()) == 1:
        inner = inner.members()[0]
    return inner.attention_factor(lengths) if isinstance(inner, RotaryMap) else 1.0


def is_blend(part: Part | None) -> bool:
    """Whether a part blends an old and a new one."""
    return isinstance(part, OuterPart) and part.strength is not None
