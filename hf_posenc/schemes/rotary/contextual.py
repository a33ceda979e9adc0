"""Rotations by places that a layer computes from its input, instead of the positions of the tokens."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from hf_posenc.schemes.parts import PairwiseBias
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.rotation_kernel import apply_rotation, rotation_factors


class ContextualRotation(PairwiseBias):
    """Rotates queries and keys by a place per token and key head: a real number, computed from the layer's input.

    A cache holds keys before this rotation, and the number that each token contributes to the places in an additional
    channel of its key. So the rotation is applied to all keys in every call. Attention functions receive the rotated
    heads. Where heads cannot be exchanged, `forward` gives the change of the logits as a bias.

    Args:
        rotation: the frequencies and the pairing of dimensions.
        num_heads: number of query heads.
        num_key_heads: number of key heads. Query heads rotate as their key head does.
    """

    num_features = 1
    reads_heads = True
    replaces_logits = True
    reads_later_keys = False
    reads_positions = False

    def __init__(self, rotation: RotaryMap, num_heads: int, num_key_heads: int) -> None:
        super().__init__()
        self.rotation = rotation
        self.num_heads = num_heads
        self.groups = num_heads // num_key_heads

    def contributions(self, hidden_states: Tensor) -> Tensor:
        """What each token contributes to the places.

        Args:
            hidden_states: `(batch, length, hidden)` float32, the layer's input.

        Returns:
            `(batch, length, key_value_heads or 1)` float32.
        """
        raise NotImplementedError

    def places(self, contributions: Tensor, keys: Positions) -> Tensor:
        """The places of all keys, `(batch, key_value_heads, key_len)` float32, from contributions of that shape."""
        raise NotImplementedError

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns what each token contributes, `(batch, heads, length, 1)` float32."""
        own = self.contributions(hidden_states.float()).transpose(1, 2)
        repeats = self.num_heads // own.shape[1]
        return own.repeat_interleave(repeats, dim=1).unsqueeze(-1)

    def rotated(self, pairs: AttentionPairs) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys; each keeps its shape and dtype.

        Raises:
            ValueError: if the features of the keys are missing.
        """
        cosine, sine = self._phases(pairs)
        own_cosine, own_sine = (phase.index_select(1, pairs.query_slots) for phase in (cosine, sine))
        return self._turn(pairs.query, own_cosine, own_sine), self._turn(pairs.key, cosine, sine)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32: rotated logits minus those before the rotation."""
        before = dataclasses.replace(pairs, query=pairs.query.float(), key=pairs.key.float())
        query, key = self.rotated(before)
        after = dataclasses.replace(pairs, query=query, key=key)
        return (_products(after) - _products(before)) * pairs.scaling

    def _turn(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        layout = self.rotation.layout
        return apply_rotation(heads, rotation_factors(cosine, sine, layout, heads.dtype), layout)

    def _phases(self, pairs: AttentionPairs) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all keys, each `(batch, key_len, key_value_heads, rotary_dim)` float32."""
        if pairs.key_features is None:
            raise ValueError(
                f"{type(self).__name__} computes the places of tokens from hidden states, but this layer does not "
                "provide them."
            )
        places = self.places(pairs.key_features.squeeze(-1)[:, :: self.groups], pairs.keys)
        frequencies = self.rotation.inverse_frequencies(pairs.keys.lengths)
        angles = self.rotation.for_both_of_pair(places.transpose(1, 2).unsqueeze(-1) * frequencies)
        return angles.cos(), angles.sin()


def _products(pairs: AttentionPairs) -> Tensor:
    """`(batch, heads, query_len, key_len)`: the inner products of queries and keys."""
    return pairs.query @ pairs.expanded_key.transpose(-1, -2)
