"""Position maps that change only the positions of far pairs, for rotations and distance biases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.outer_parts import OuterPart, sum_of_biases
from hf_posenc.schemes.parts import AttentionPairs, DistanceBias, LogitBias, OtherHeads, PairwiseBias, SchemeParts
from hf_posenc.schemes.position_maps.mapped import PositionMapConfig, needs_whole_positions
from hf_posenc.schemes.rotary.rope import LengthDependentRotaryMap, RotaryMap


class FarRotation(PairwiseBias):
    """A correction of far pairs: the logit with far positions minus the logit that the layer computes.

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

    def __init__(self, rotation: RotaryMap, far: FarPositionsConfig) -> None:
        super().__init__()
        self.rotation = rotation
        self.far = far

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32; zero for near pairs."""
        query, key = pairs.query.float(), pairs.key.float()
        of_query, of_key = pairs.remembered(f"far positions {id(self)}", lambda: self._far_positions(pairs))
        far_query, far_key = self.rotation.map_query(query, of_query), self.rotation.map_key(key, of_key)
        far = dataclasses.replace(pairs, query=far_query, key=far_key)
        change = far.products - dataclasses.replace(pairs, query=query, key=key).products
        ids = pairs.query_positions, pairs.keys.ids
        are_far = pairs.remembered(f"far pairs {id(self)}", lambda: self.far.are_far(*ids).unsqueeze(1))
        return (change * pairs.scaling).where(are_far, 0.0)

    def other_heads(self, pairs: AttentionPairs) -> OtherHeads | None:
        """Returns the heads rotated by far positions, if positions rise from key to key and are those of all texts."""
        # Kept for all layers, unlike the values of `forward`, because only one piece of text is computed this way.
        sources = pairs.keys.ids, pairs.query_slots
        key_counts = pairs.keys.remembered(f"far keys {id(self)}", lambda: self._far_keys(pairs), *sources)
        if key_counts is None:
            return None
        of_query, of_key = pairs.keys.remembered(f"far text {id(self)}", lambda: self._far_positions(pairs), *sources)
        far_query = self.rotation.map_query(pairs.query.float(), of_query)
        return OtherHeads(far_query, self.rotation.map_key(pairs.key.float(), of_key), key_counts)

    def _far_keys(self, pairs: AttentionPairs) -> Tensor | None:
        query_ids, key_ids = pairs.query_positions, pairs.keys.ids
        if not key_ids.is_cpu or key_ids.shape[0] > 1 or not bool((key_ids.diff() > 0).all()):
            return None
        return torch.searchsorted(key_ids[0], self.far.last_key(query_ids)[0].contiguous(), right=True)

    def _far_positions(self, pairs: AttentionPairs) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The rotations from own to far positions of queries and of keys."""
        query_ids, key_ids = pairs.query_positions, pairs.keys.ids
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

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        distance = self.far.distance(pairs.query_positions, pairs.keys.ids)
        return self.total(lambda bias: bias(distance)).transpose(0, 1)


class FarPositionsConfig(PositionMapConfig):
    """Base class of configs that change the positions of far pairs: of a query and all keys up to `last_key`.

    Args:
        inner: the scheme that gets the changed positions.
    """

    #: Whether far positions may be non-integers.
    gives_real_positions: ClassVar[bool] = False

    @property
    def first_query(self) -> int:
        """The first position whose query has far keys."""
        raise NotImplementedError

    def query(self, ids: Tensor) -> Tensor:
        """Returns the positions of queries for far keys, in the shape of `ids`."""
        raise NotImplementedError

    def key(self, ids: Tensor) -> Tensor:
        """Returns the positions of keys for far queries, in the shape of `ids`."""
        raise NotImplementedError

    def last_key(self, ids: Tensor) -> Tensor:
        """Returns the last far key of queries, in the shape of `ids`. By default, all far pairs are equally far."""
        return ids - self.first_query

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

    def mask(self) -> PairwiseBias | None:
        """Returns a bias that hides some pairs, if this scheme does."""
        return None

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
        mask = self.mask()
        _check_follows(owner, self.inner, parts, encodes=mask is None)
        if bias is not None and self.gives_real_positions and needs_whole_positions(bias):
            raise ValueError(
                f"{owner}.inner is {self.inner.name!r}, which needs integer positions, but this factor produces real "
                "ones for far pairs. Omit the factor, or use 'self_extend', or a bias that accepts real distances, "
                "such as 'alibi'."
            )
        biases: list[LogitBias] = [] if mask is None else [mask]
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
