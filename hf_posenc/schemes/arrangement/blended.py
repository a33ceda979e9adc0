"""Interpolation between two schemes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.arrangement.schedule import nested_scheme
from hf_posenc.schemes.config import OuterConfig, SchemeConfig
from hf_posenc.schemes.features import joined_features, pairs_of_parts
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.outer_parts import OuterPart, PartType, declare_together, weighted_sum
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    QueryKeyMap,
    SchemeParts,
)
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.reach import Reach, shortest
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.rotary.rope import RopeConfig, RotaryMap
from hf_posenc.schemes.validation import option


class BlendedPart(OuterPart[PartType]):
    """A part of the old scheme and its counterpart in the new one; either may be missing.

    Args:
        old: has the weight `1 - strength`, and is not computed at strength 1.
        new: has the weight `strength`. It is computed even at strength 0, so that its parameters have gradients (zeros)
            from the first step on, which DDP and resumed optimizers need.
        strength: between 0 and 1.
    """

    def __init__(self, old: PartType | None, new: PartType | None, strength: float) -> None:
        super().__init__()
        self.old = old
        self.new = new
        self.strength = strength
        declare_together(self, self.members())
        self.length_reach = shortest(self._reached(part, weight) for part, weight in self._called())

    def members(self) -> list[PartType]:
        """The parts that are not missing, the old one first."""
        return [part for part in (self.old, self.new) if part is not None]

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Calls `check_cache` of the parts that are computed."""
        for part, _ in self.weighted():
            part.check_cache(cached_length, total_length)

    def _reached(self, part: PartType, weight: float) -> Reach:
        """The longest sequence that one of the parts can encode with this weight."""
        return part.length_reach

    def weighted(self) -> list[tuple[PartType, float]]:
        """The parts that are computed, with their weights."""
        found: list[tuple[PartType, float]] = []
        if self.old is not None and self.strength < 1:
            found.append((self.old, 1 - self.strength))
        if self.new is not None:
            found.append((self.new, self.strength))
        return found

    def _called(self) -> list[tuple[PartType, float]]:
        """As `weighted`. At strength 1, an old part alone is called too, because zeros need the shape of its result."""
        return self.weighted() or [(part, 0.0) for part in self.members()]

    def blended(self, value: Callable[[PartType], Tensor]) -> Tensor:
        """The weighted sum of the values of the parts."""
        return weighted_sum((value(part), weight) for part, weight in self._called())


class BlendedEncoding(BlendedPart[AdditiveEncoding], AdditiveEncoding):
    """`(1 - s) * old + s * new`."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length, hidden)`."""
        return self.blended(lambda part: part(positions))


class BlendedMap(BlendedPart[QueryKeyMap], QueryKeyMap):
    """The old map at positions `(1 - s) * p`, followed by the new map at positions `s * p`.

    The angles of two rotations of the same pairs are added, which gives one rotation with interpolated frequencies.
    """

    def __init__(self, old: QueryKeyMap | None, new: QueryKeyMap | None, strength: float) -> None:
        super().__init__(old, new, strength)
        widths = [part.rotary_dim for part in self.members()]
        self.rotary_dim = None if None in widths else max(cast("list[int]", widths))
        self.symmetric = all(part.symmetric for part in self.members())
        self._shares: list[int] = []

    def _reached(self, part: QueryKeyMap, weight: float) -> Reach:
        """The longest sequence of the map at positions multiplied by the weight."""
        return dataclasses.replace(
            part.length_reach.under(lambda last: math.floor(weight * last)), made_for=part.length_reach.made_for
        )

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the concatenated phases of the parts that are computed."""
        self._shares = []
        phases: list[Tensor] = []
        for part, weight in self.weighted():
            own = part.phases(_scaled_positions(positions, weight))
            # The factor of a rotation (YaRN's temperature) is raised to the power of its weight.
            factor = _attention_scaling(part) ** (weight - 1)
            phases += own if factor == 1.0 else [phase * factor for phase in own]
            self._shares.append(len(own))
        return tuple(phases)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, heads, length, head_dim)`, in the dtype of `query`."""
        for (part, _), own in zip(self.weighted(), self._split(phases), strict=True):
            query = part.map_query(query, own)
        return query

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, key_value_heads, length, head_dim)`, in the dtype of `key`."""
        for (part, _), own in zip(self.weighted(), self._split(phases), strict=True):
            key = part.map_key(key, own)
        return key

    def _split(self, phases: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        ends = list(itertools.accumulate(self._shares, initial=0))
        return [phases[start:end] for start, end in itertools.pairwise(ends)]


class BlendedDistanceBias(BlendedPart[LogitBias], DistanceBias):
    """`(1 - s) * old + s * new` of two functions of distance."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        return self.blended(lambda part: part(distance))


class BlendedPairwiseBias(BlendedPart[LogitBias], PairwiseBias):
    """`(1 - s) * old + s * new` of two biases, at least one of which is not a distance bias."""

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the features of both biases in one float32 tensor."""
        return joined_features((self.old, self.new), hidden_states)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        of_old, of_new = pairs_of_parts((self.old, self.new), pairs)
        return self.blended(lambda part: pairwise_bias(part, of_new if part is self.new else of_old))


class BlendedScale(BlendedPart[LogitScale], LogitScale):
    """`(1 - s) * old + s * new`; a missing scale counts as 1.

    Logarithms are not interpolated instead, because a scale may be 0 (SSMax at the first token).
    """

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads or 1, length)` in float32."""
        old = None if self.old is None or self.strength == 1 else self.old(positions)
        new = None if self.new is None else self.new(positions)
        one = torch.ones_like(positions.ids, dtype=torch.float32).unsqueeze(1)
        return (one if old is None else old) * (1 - self.strength) + (one if new is None else new) * self.strength


def _attention_scaling(part: QueryKeyMap) -> float:
    inner: Any = part
    while hasattr(inner, "inner"):
        inner = inner.inner
    return inner.attention_scaling if isinstance(inner, RotaryMap) else 1.0


def _scaled_positions(positions: Positions, weight: float) -> Positions:
    """The positions multiplied by `weight`; padding stays negative."""
    if weight == 1:
        return positions

    def scaled(ids: Tensor) -> Tensor:
        return (ids.float() * weight).where(ids >= 0, ids.float())

    coordinates = None if positions.coordinates is None else scaled(positions.coordinates)
    return dataclasses.replace(positions, ids=scaled(positions.ids), coordinates=coordinates)


@register_scheme
@dataclass(frozen=True)
class BlendedConfig(OuterConfig):
    """Interpolates between an old and a new scheme, to move a pretrained model gradually from one to the other.

    With `s` for `strength`, each kind of part is interpolated separately::

        added vectors   (1 - s) * old(p) + s * new(p)
        rotations       first old((1 - s) * p), then new(s * p)
        biases          (1 - s) * old(i, j) + s * new(i, j)
        logit scales    (1 - s) * old(i) + s * new(i)

    so that 0 is the old scheme and 1 the new one. Missing parts count as zero vectors, no rotation, a bias of 0 and a
    scale of 1. The angles of two rotations that pair the same dimensions are added, which gives one rotation with
    interpolated frequencies. The positions of a rotation without a counterpart are interpolated (arXiv:2306.15595)
    until all are equal.

    `hf_posenc.recipes.swap_scheme(model, ..., gradual=True)` creates one from the current scheme of a model, and
    `GradualSwapCallback` raises the strength during training.

    Args:
        old: the scheme at strength 0.
        new: the scheme at strength 1.
        strength: between 0 and 1.

    Raises:
        ValueError: for a layered config instead of a scheme (blend the schemes inside its layers), or a strength
            outside [0, 1].
    """

    name: ClassVar[str] = "blended"
    combinator: ClassVar[bool] = True
    merges_children: ClassVar[bool] = True
    shares_children: ClassVar[bool] = False

    old: SchemeConfig = option(RopeConfig, nested_scheme)
    new: SchemeConfig = option(NoneConfig, nested_scheme)
    strength: float = option(0.0, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, config in self.children().items():
            if isinstance(config, BlendedConfig):
                raise ValueError(f"BlendedConfig.{name} is a blend itself; only two schemes can be blended.")

    def merge(self, built: Sequence[SchemeParts]) -> SchemeParts:
        """Interpolates the parts of the two schemes.

        Raises:
            UnsupportedError: if a rotation of one of them does not support scaled positions.
        """
        old, new = built
        for (name, config), parts in zip(self.children().items(), built, strict=True):
            _refuse_unblendable(f"BlendedConfig.{name}", config, parts)
        strength = float(self.strength)
        biases = (old.logit_bias, new.logit_bias)
        of_distance = all(bias is None or isinstance(bias, DistanceBias) for bias in biases)
        bias_class: Any = BlendedDistanceBias if of_distance else BlendedPairwiseBias

        def blended(kind: Any, first: Any, second: Any) -> Any:
            return None if first is None and second is None else kind(first, second, strength)

        return SchemeParts(
            additive=blended(BlendedEncoding, old.additive, new.additive),
            query_key_map=blended(BlendedMap, old.query_key_map, new.query_key_map),
            logit_bias=blended(bias_class, *biases),
            logit_scale=blended(BlendedScale, old.logit_scale, new.logit_scale),
        )


def _refuse_unblendable(owner: str, config: SchemeConfig, parts: SchemeParts) -> None:
    rotation, bias = parts.query_key_map, parts.logit_bias
    reason = None
    if isinstance(bias, PairwiseBias) and bias.replaces_logits:
        reason = "replaces logits of a single rotation"
    elif rotation is not None and rotation.width_factor != 1:
        reason = "changes the width of heads, which cannot be done gradually"
    elif rotation is not None and any(getattr(module, "whole_positions", False) for module in rotation.modules()):
        reason = "supports only whole positions, but a blend multiplies them by a fraction"
    if reason is not None:
        raise UnsupportedError(
            f"{owner} is {config.name!r}, which {reason}. Swap to it, or from it, in one step: swap_scheme(model, "
            "scheme) without gradual=True."
        )
