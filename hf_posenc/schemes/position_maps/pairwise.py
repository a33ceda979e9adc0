"""Position maps that change only the positions of far pairs, for rotations and distance biases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.outer_parts import OuterPart, sum_of_biases
from hf_posenc.schemes.parts import (
    HIDDEN,
    AttentionPairs,
    DistanceBias,
    LogitBias,
    OtherHeads,
    PairwiseBias,
    SchemeParts,
)
from hf_posenc.schemes.position_maps.mapped import PositionMapConfig, needs_whole_positions
from hf_posenc.schemes.rotary.rope import LengthDependentRotaryMap, RotaryMap
from hf_posenc.schemes.weights import traced


class FarRotation(PairwiseBias):
    """A correction of far pairs: the logit with far positions minus the logit that the layer computes.

    Pairs that the far positions hide get a number that leaves them no weight.

    Queries and keys are passed, and cached, after rotation by their own positions. Rotations compose, so rotating them
    again by the difference gives the rotation by far positions. Both logits are computed in float32. If the layer
    computes its logits in 16 bits, that rounding error remains in far pairs.

    Args:
        rotation: the layer's own rotation.
        far: the far positions.
    """

    whole_heads = False
    reads_heads = True
    replaces_logits = True
    reads_later_keys = False
    zero_below = property(lambda self: self.far.first_query)
    hides_pairs = property(lambda self: self.far.hides)

    def __init__(self, rotation: RotaryMap, far: FarPositionsConfig) -> None:
        super().__init__()
        self.rotation = rotation
        self.far = far

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32; zero for near pairs."""
        are_far, (of_query, of_key), hidden = pairs.remembered(f"far {id(self)}", lambda: self._far_pairs(pairs))
        narrowed = pairs.query.is_cpu and not traced()
        key = pairs.key[..., : are_far.shape[-1], :] if narrowed else pairs.key
        query, key = pairs.query.float(), key.float()
        far_query, far_key = self.rotation.map_query(query, of_query), self.rotation.map_key(key, of_key)
        far = dataclasses.replace(pairs, query=far_query, key=far_key)
        change = far.products - dataclasses.replace(pairs, query=query, key=key).products
        scaling = pairs.scaling
        if isinstance(scaling, Tensor) and scaling.dim():
            # It may have a number for each pair.
            scaling = scaling[..., : are_far.shape[-1]]
        bias = (change * scaling).where(are_far, 0.0)
        if narrowed:
            bias = nn.functional.pad(bias, (0, pairs.key.shape[-2] - bias.shape[-1]))
        return bias if hidden is None else bias.masked_fill(hidden, HIDDEN)

    def other_heads(self, pairs: AttentionPairs) -> OtherHeads | None:
        """Returns the heads rotated by far positions, if positions rise from key to key and are those of all texts."""
        # Kept for all layers, unlike the values of `forward`, because only one piece of text is computed this way.
        sources = pairs.keys.ids, pairs.query_slots
        text = pairs.keys.remembered(f"far text {id(self)}", lambda: self._far_text(pairs), *sources)
        if text is None:
            return None
        key_counts, near_starts, count, (of_query, of_key) = text
        far_query = self.rotation.map_query(pairs.query.float(), of_query)
        far_key = self.rotation.map_key(pairs.key[..., :count, :].float(), of_key)
        return OtherHeads(far_query, far_key, key_counts, near_starts)

    def _far_text(self, pairs: AttentionPairs) -> tuple[Tensor, Tensor, int, tuple[Any, Any]] | None:
        """How many keys of each query are far, and how many far or hidden; the most that are far; their rotations."""
        query_ids, key_ids = pairs.query_positions, pairs.keys.ids
        if not key_ids.is_cpu or key_ids.shape[0] > 1 or not bool((key_ids.diff() > 0).all()):
            return None
        last = torch.cat((self.far.last_key(query_ids), self.far.last_hidden(query_ids)))
        far, far_or_hidden = torch.searchsorted(key_ids[0], last, right=True)
        count = int(far.max())
        return far, far_or_hidden, count, self._far_positions(pairs, key_ids[:, :count])

    def _far_pairs(self, pairs: AttentionPairs) -> tuple[Tensor, tuple[Any, Any], Tensor | None]:
        """Which pairs are far, their rotations, and which pairs are hidden.

        Where the values can be read, the first two are for the first keys only, up to the last far one.
        """
        ids = pairs.query_positions, pairs.keys.ids
        are_far = self.far.are_far(*ids)
        hidden = self.far.are_hidden(*ids, are_far).unsqueeze(1) if self.far.hides else None
        if are_far.is_cpu and not traced():
            columns = are_far.flatten(0, 1).any(0).nonzero()
            are_far = are_far[..., : int(columns[-1]) + 1 if len(columns) else 0]
        return are_far.unsqueeze(1), self._far_positions(pairs, ids[1][:, : are_far.shape[-1]]), hidden

    def _far_positions(self, pairs: AttentionPairs, key_ids: Tensor) -> tuple[Any, Any]:
        """The rotations from own to far positions of queries, and of keys at `key_ids`."""
        query_ids = pairs.query_positions
        far_query, far_key = self.far.query(query_ids) - query_ids, self.far.key(key_ids) - key_ids
        return self._prepared(far_query, pairs), self._prepared(far_key, pairs)

    def _prepared(self, steps: Tensor, pairs: AttentionPairs) -> tuple[Any, ...]:
        """The factors of a rotation by additional positions, `(batch or 1, length)`."""
        positions = dataclasses.replace(pairs.keys, ids=steps, coordinates=None)
        cosine, sine = self.rotation.phases(positions)
        # Queries and keys already include this factor.
        factor = self.rotation.attention_factor(positions.lengths)
        unscaled = not isinstance(factor, Tensor) and factor == 1.0
        phases = (cosine, sine) if unscaled else (cosine / factor, sine / factor)
        return self.rotation.prepared(phases, torch.float32)


class FarDistanceBias(OuterPart[DistanceBias], PairwiseBias):
    """A distance bias that uses the distance of far positions for far pairs.

    Args:
        inner: the bias.
        far: the far positions.
    """

    def __init__(self, inner: DistanceBias, far: FarPositionsConfig) -> None:
        super().__init__({"inner": inner})
        self.far = far

    @property
    def plain(self) -> bool:
        """False, because far pairs have other distances than the inner bias would give them."""
        return False

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        distance = self.far.distance(pairs.query_positions, pairs.keys.ids)
        return self.total(lambda bias: bias(distance)).transpose(0, 1)


class HiddenPairs(PairwiseBias):
    """Hides the pairs that far positions hide.

    Args:
        far: the far positions.
    """

    whole_heads = False
    reads_later_keys = False
    zero_below = property(lambda self: self.far.first_query)
    hides_pairs = True

    def __init__(self, far: FarPositionsConfig) -> None:
        super().__init__()
        self.far = far

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32: 0, or a number that leaves no weight."""
        heads = pairs.query.shape[1]
        return pairs.remembered(f"hidden {id(self)}", lambda: self._of_pairs(pairs)).expand(-1, heads, -1, -1)

    def _of_pairs(self, pairs: AttentionPairs) -> Tensor:
        hidden = self.far.are_hidden(pairs.query_positions, pairs.keys.ids)
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, HIDDEN).unsqueeze(1)


def last_before(positions: Tensor) -> Tensor:
    """The last position before each of `positions`: a whole number, or the next smaller one if these are real."""
    if not positions.is_floating_point():
        return positions - 1
    return torch.nextafter(positions, torch.full_like(positions, -torch.inf))


class FarPositionsConfig(PositionMapConfig):
    """Base class of configs that change the positions of far pairs: of a query and all keys up to `last_key`.

    Args:
        inner: the scheme that gets the changed positions.
    """

    #: Whether far positions may be non-integers.
    gives_real_positions: ClassVar[bool] = False
    #: Whether queries do not see the keys between far and near ones.
    hides: ClassVar[bool] = False
    #: The distance from which on pairs are far, in configs with such an option.
    window: int

    @property
    def first_query(self) -> int:
        """The first position whose query has far keys. By default, it has a key that is a window away."""
        return self.window

    def query(self, ids: Tensor) -> Tensor:
        """Returns the positions of queries for far keys, in the shape of `ids`."""
        raise NotImplementedError

    def key(self, ids: Tensor) -> Tensor:
        """Returns the positions of keys for far queries, in the shape of `ids`."""
        raise NotImplementedError

    def last_key(self, ids: Tensor) -> Tensor:
        """Returns the last far key of queries, in the shape of `ids`. By default, all far pairs are equally far."""
        return ids - self.first_query

    def last_hidden(self, ids: Tensor) -> Tensor:
        """Returns the last key before the near keys of queries, in the shape of `ids`."""
        return self.last_key(ids)

    def are_hidden(self, query_ids: Tensor, key_ids: Tensor, are_far: Tensor | None = None) -> Tensor:
        """Returns which pairs are between far and near ones, `(batch or 1, query_len, key_len)` bool."""
        far_or_hidden = key_ids.unsqueeze(-2) <= self.last_hidden(query_ids).unsqueeze(-1)
        return far_or_hidden & ~(self.are_far(query_ids, key_ids) if are_far is None else are_far)

    def are_far(self, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """Returns which pairs are far, `(batch or 1, query_len, key_len)` bool."""
        return key_ids.unsqueeze(-2) <= self.last_key(query_ids).unsqueeze(-1)

    def distance(self, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """Returns key position minus query position, `(batch or 1, query_len, key_len)`, by far positions if far."""
        far = self.key(key_ids).unsqueeze(-2) - self.query(query_ids).unsqueeze(-1)
        return far.where(self.are_far(query_ids, key_ids), key_ids.unsqueeze(-2) - query_ids.unsqueeze(-1))

    def greatest_distance(self, length: int) -> int:
        """Returns the greatest distance in a text of `length` tokens: that of its last token to the first."""
        last = torch.tensor([length - 1])
        far = math.ceil(self.query(last).item() - self.key(torch.zeros_like(last)).item())
        return min(length - 1, max(self.first_query - 1, far))

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme, and a bias that corrects far pairs.

        Raises:
            UnsupportedError: in a bidirectional model.
            ValueError: for a scheme that has neither a rotation proportional to positions nor a distance bias, has
                parts that far positions cannot be applied to, or needs integer positions if far positions are real.
        """
        owner = type(self).__name__
        if not context.causal:
            raise UnsupportedError(
                f"{owner} only changes positions of past keys, but this model is bidirectional and attends to later "
                "keys too. Use position_scale, or a RoPE scaling."
            )
        parts = self.inner.build(context)
        rotation, bias = parts.query_key_map, parts.logit_bias
        _check_follows(owner, self.inner, parts, encodes=not self.hides)
        if bias is not None and self.gives_real_positions and needs_whole_positions(bias):
            raise ValueError(
                f"{owner}.inner is {self.inner.name!r}, which needs integer positions, but this factor produces real "
                "ones for far pairs. Omit the factor, or use 'self_extend', or a bias that accepts real distances, "
                "such as 'alibi'."
            )
        biases: list[LogitBias] = [HiddenPairs(self)] if self.hides and rotation is None else []
        if rotation is not None:
            rotation.mapped_again = True
            biases.append(FarRotation(cast("RotaryMap", rotation), self))
        if bias is not None:
            biases.append(FarDistanceBias(cast("DistanceBias", bias), self))
        far = sum_of_biases(biases) if len(biases) > 1 else biases[0]
        return SchemeParts(parts.additive, rotation, far, parts.logit_scale)


def _check_follows(owner: str, scheme: SchemeConfig, parts: SchemeParts, encodes: bool) -> None:
    rotation, bias = parts.query_key_map, parts.logit_bias
    # Subclasses may rotate by angles that are not multiples of the position.
    if rotation is not None and type(rotation) not in (RotaryMap, LengthDependentRotaryMap):
        raise ValueError(
            f"{owner}.inner is {scheme.name!r}, whose map of queries and keys cannot be changed to other positions by "
            "a second rotation. Use 'rope' or 'p_rope'."
        )
    if bias is not None and not isinstance(bias, DistanceBias):
        raise ValueError(
            f"{owner}.inner is {scheme.name!r}, whose bias depends on more than the distance of a pair, so it cannot "
            "be computed at other positions. Use 'alibi' or 't5', or compose it with this scheme."
        )
    if encodes and rotation is None and bias is None:
        raise ValueError(f"{owner}.inner is {scheme.name!r}, which encodes no distances. Use 'rope', 'alibi' or 't5'.")
