"""The features of biases in one tensor: those of query heads, and those that the query heads of a key head share.

A bias with features of query heads only has `(batch, heads, length, features)`. As soon as some are shared, everything
is grouped by key head: `(batch, key_value_heads, length, groups * own + shared)`, the features of each query head of
the group first. So a tensor of either kind can be cut, repeated and cached by its heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.schemes.parts import LogitBias, PairwiseBias, feature_counts
from hf_posenc.schemes.positions import AttentionPairs


def separated(features: Tensor, unshared: int, shared: int) -> tuple[Tensor | None, Tensor | None]:
    """Separates the two kinds of features.

    Args:
        features: the features of a bias, as `PairwiseBias.key_features` returns them.
        unshared: how many there are per query head.
        shared: how many there are per key head.

    Returns:
        `(batch, heads, length, own)` and `(batch, key_value_heads, length, shared)`; `None` for a kind without any.
    """
    if not shared:
        return features, None
    if not unshared:
        return None, features
    grouped, of_key_heads = torch.split_with_sizes(features, [features.shape[-1] - shared, shared], dim=-1)
    return torch.unflatten(grouped, -1, (-1, unshared)).transpose(2, 3).flatten(1, 2), of_key_heads


def joined(unshared: Tensor | None, shared: Tensor | None) -> Tensor:
    """The inverse of `separated`; at least one of the two is not `None`."""
    if shared is None:
        assert unshared is not None
        return unshared
    if unshared is None:
        return shared
    grouped = torch.unflatten(unshared, 1, (shared.shape[1], -1)).transpose(2, 3).flatten(3)
    return torch.cat((grouped, shared), dim=-1)


def joined_features(biases: Sequence[LogitBias | None], hidden_states: Tensor) -> Tensor:
    """The features of several biases in one tensor.

    Args:
        biases: at least one of them has features.
        hidden_states: `(batch, length, hidden)`, the layer's input.

    Returns:
        Features of as many numbers as the biases have together, float32.
    """
    of_heads: list[Tensor] = []
    of_key_heads: list[Tensor] = []
    for bias in biases:
        if not isinstance(bias, PairwiseBias) or not bias.num_features:
            continue
        unshared, shared = separated(bias.key_features(hidden_states), *feature_counts(bias))
        of_heads += [] if unshared is None else [unshared]
        of_key_heads += [] if shared is None else [shared]
    return joined(_side_by_side(of_heads), _side_by_side(of_key_heads))


def pairs_of_parts(biases: Sequence[LogitBias | None], pairs: AttentionPairs) -> list[AttentionPairs]:
    """The pairs that each of several biases receives: with its own features out of those of all of them.

    Args:
        biases: the biases in the order in which `joined_features` received them.
        pairs: the pairs with the features of all biases, or without features.
    """
    features = pairs.key_features
    if features is None or len(biases) == 1:
        return [pairs] * len(biases)
    counts = [feature_counts(bias) for bias in biases]
    totals = sum(unshared for unshared, _ in counts), sum(shared for _, shared in counts)
    of_heads, of_key_heads = separated(features, *totals)
    first, first_shared = 0, 0
    result = []
    for unshared, shared in counts:
        if (unshared, shared) == totals:
            result.append(pairs)
        elif unshared or shared:
            selected = joined(_part(of_heads, first, unshared), _part(of_key_heads, first_shared, shared))
            result.append(dataclasses.replace(pairs, key_features=selected))
        else:
            result.append(dataclasses.replace(pairs, key_features=None))
        first, first_shared = first + unshared, first_shared + shared
    return result


def _part(features: Tensor | None, first: int, count: int) -> Tensor | None:
    return features[..., first : first + count] if features is not None and count else None


def _side_by_side(features: list[Tensor]) -> Tensor | None:
    if len(features) <= 1:
        return next(iter(features), None)
    return torch.cat(features, dim=-1)
