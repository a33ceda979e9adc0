"""Rotations by angles that a layer computes from its input, instead of the positions of the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.schemes.config import BuildContext
from hf_posenc.schemes.parts import AttentionPairs, LogitBias, PairwiseBias, Positions
from hf_posenc.schemes.rotary.rope import RotaryMap, by_frequencies_alone
from hf_posenc.schemes.rotary.rotation_kernel import (
    RotationFactors,
    apply_rotation,
    factors_of_angles,
    factors_of_signed_angles,
    takes_signed_angles,
)
from hf_posenc.schemes.weights import traced


class ContextualRotation(PairwiseBias):
    """Rotates queries and keys by angles that are computed from the layer's input.

    A cache holds the features of each token in additional channels of its key. If `angles_stay`, a cache that drops no
    tokens holds rotated keys, as with RoPE. Other caches hold keys before this rotation, which is then applied to all
    keys in every call. Attention functions receive the rotated heads. Where heads cannot be exchanged, `forward` gives
    the change of the logits as a bias.

    Args:
        rotary_dim: how many leading dimensions of a head are rotated.
        layout: the pairing of dimensions, as in `RotaryMap`.
        context: the place in the model. Query heads rotate as their key head does.
    """

    reads_heads = True
    replaces_logits = True
    reads_later_keys = False
    reads_positions = False
    sums_tokens = True
    rotates_heads = True
    #: Whether the angles of a token depend on no later token, so that its rotated key can be cached.
    angles_stay: bool = False
    #: Whether they depend on no earlier token either, so that any cache can hold its rotated key, without features.
    angles_of_own_token: bool = False

    def __init__(self, rotary_dim: int, layout: str, context: BuildContext) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.layout = "half" if layout == "auto" else layout
        self.num_key_heads = context.key_heads
        self.groups = context.num_heads // context.key_heads

    def own_features(self, hidden_states: Tensor) -> Tensor:
        """The numbers from which the angles of a token and of later tokens are computed.

        Args:
            hidden_states: `(batch, length, hidden)` float32, the layer's input.

        Returns:
            `(batch, key_value_heads or 1, length, num_features)` float32.
        """
        raise NotImplementedError

    def angles(self, features: Tensor, keys: Positions) -> Tensor:
        """The angles of all keys in radians.

        Args:
            features: `(batch, key_value_heads, key_len, num_features)` float32, of all keys, cached ones included.
            keys: the positions of the keys.

        Returns:
            `(batch, key_value_heads, key_len, rotary_dim / 2)` float32.
        """
        raise NotImplementedError

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the features of each token, `(batch, key_value_heads, length, num_features)` float32."""
        features = self.own_features(hidden_states.float())
        return features if features.shape[1] == self.num_key_heads else features.expand(-1, self.num_key_heads, -1, -1)

    def rotated(self, pairs: AttentionPairs) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys; each keeps its shape and dtype.

        Raises:
            ValueError: if the features of the keys are missing.
        """
        if pairs.key_features is None:
            raise ValueError(
                f"{type(self).__name__} computes angles from hidden states, which this layer lacks. Use 'rope'."
            )
        factors = self.factors(pairs.key_features, pairs.keys, pairs.key.dtype)
        # As many queries as keys are the same tokens. A graph must not depend on these numbers.
        same = not traced() and pairs.query.shape[-2] == pairs.key.shape[-2]
        of_queries = factors if same else factors.each(lambda factor: factor.index_select(-2, pairs.query_slots))
        query = apply_rotation(pairs.query, of_queries, self.layout)
        return query, apply_rotation(pairs.key, factors, self.layout)

    def factors(
        self, features: Tensor, keys: Positions, dtype: torch.dtype, cached: Tensor | None = None
    ) -> RotationFactors:
        """The factors of new tokens, which are the last of the keys. By default the angles of all keys are computed.

        Args:
            features: `(batch, key_value_heads, new, num_features)` float32, those of the new tokens.
            keys: the positions of all keys.
            dtype: that of the heads.
            cached: the features of the keys before, or `None` if there are none, or if they are not needed.
        """
        if cached is None:
            return factors_of_angles(self.angles(features, keys), self.layout, dtype)
        angles = self.angles(torch.cat((cached, features), dim=-2), keys)
        return factors_of_angles(angles[..., cached.shape[-2] :, :], self.layout, dtype)

    def factors_in_slots(self, features: Tensor, keys: Positions, slots: Tensor, dtype: torch.dtype) -> RotationFactors:
        """The factors of new tokens in a cache with room for later ones, as in a compiled graph.

        Args:
            features: `(batch, key_value_heads, key_len, num_features)` float32, those of all slots.
            keys: the positions of all slots.
            slots: `(new,)` int64, the slots of the new tokens. What is in later slots does not matter.
            dtype: that of the heads.
        """
        return self.factors(features, keys, dtype).each(lambda factor: factor.index_select(-2, slots))

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32: rotated logits minus those before the rotation."""
        before = dataclasses.replace(pairs, query=pairs.query.float(), key=pairs.key.float())
        query, key = self.rotated(before)
        after = dataclasses.replace(pairs, query=query, key=key)
        return (after.products - before.products) * pairs.scaling


def unfilled(keys: Positions, slots: Tensor) -> Tensor:
    """`(batch or 1, 1, key_len)` bool: padding, and slots behind that of a single new token; layers share it."""

    def find() -> Tensor:
        later = torch.arange(keys.ids.shape[-1], device=slots.device) > slots
        return later | keys.padding

    return keys.remembered("unfilled", find, keys.ids, slots)


def rotation_before_cache(summands: Sequence[LogitBias]) -> ContextualRotation | None:
    """The rotation by the layer's input, if it is the only one, and no other summand needs keys without it."""
    rotations = [summand for summand in summands if isinstance(summand, ContextualRotation) and summand.rotates_heads]
    others = [summand for summand in summands if not summand.rotates_heads]
    if len(rotations) != 1 or not rotations[0].angles_stay:
        return None
    if any(isinstance(summand, PairwiseBias) and (summand.reads_heads or summand.num_features) for summand in others):
        return None
    return rotations[0]


class ContextualPlaces(ContextualRotation):
    """A rotation by a place per token and key head: a real number that stands for its position.

    A token has one feature, from which its place and those of later tokens follow.

    Args:
        rotation: the frequencies and the pairing of dimensions.
        context: the place in the model.
    """

    num_features = 1
    num_shared_features = 1

    def __init__(self, rotation: RotaryMap, context: BuildContext) -> None:
        super().__init__(rotation.rotary_dim, rotation.layout, context)
        self.rotation = by_frequencies_alone(rotation, type(self).__name__)

    def places(self, contributions: Tensor, keys: Positions) -> Tensor:
        """The places of all keys, `(batch, key_value_heads, key_len, 1)` float32, from the feature of each token.

        By default the feature is the place.
        """
        return contributions

    def angles(self, features: Tensor, keys: Positions) -> Tensor:
        """Returns the places times the frequencies, `(batch, key_value_heads, key_len, rotary_dim / 2)` float32."""
        return self.places(features, keys) * self.rotation.inverse_frequencies(keys.lengths)

    def factors(
        self, features: Tensor, keys: Positions, dtype: torch.dtype, cached: Tensor | None = None
    ) -> RotationFactors:
        """Computes all places, but only the angles of new tokens."""
        if type(self).angles is not ContextualPlaces.angles:
            return super().factors(features, keys, dtype, cached)
        if cached is None:
            return self.factors_at(self.places(features, keys), keys, dtype)
        places = self.places(torch.cat((cached, features), dim=-2), keys)
        return self.factors_at(places[..., cached.shape[-2] :, :], keys, dtype)

    def factors_at(self, places: Tensor, keys: Positions, dtype: torch.dtype) -> RotationFactors:
        """The factors at some places, `(batch, key_value_heads, length, 1)`, for the frequencies at these keys."""
        if self.layout == "interleaved" or not takes_signed_angles(places.numel() * self.rotary_dim):
            return factors_of_angles(places * self.rotation.inverse_frequencies(keys.lengths), self.layout, dtype)
        return factors_of_signed_angles(places * self.rotation.signed_frequencies(keys), dtype)
