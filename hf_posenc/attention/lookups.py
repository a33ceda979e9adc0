"""Look-ups of a bias per pair, for flex attention's score function, instead of a tensor of all pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.forms import DistanceForm, FusedForm, SeparableForm


class DistanceLookUp:
    """A look-up `[batch, head, query, key]` that stores one number per distance.

    Args:
        vector: `(heads, query_len + key_len - 1)`, by rising distance.
        query_length: number of queries.
    """

    def __init__(self, vector: Tensor, query_length: int) -> None:
        self.vector = vector
        self.query_length = query_length

    def __getitem__(self, pair: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        _, head, query, key = pair
        return self.vector[head, key - query + (self.query_length - 1)]


class SeparableLookUp:
    """A look-up `[batch, head, query, key]` that stores one number per key and one per query.

    Args:
        of_keys: `(batch or 1, heads, key_len)`.
        of_queries: `(batch or 1, heads, query_len)`.
    """

    def __init__(self, of_keys: Tensor, of_queries: Tensor) -> None:
        self.of_keys = of_keys
        self.of_queries = of_queries

    def __getitem__(self, pair: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, query, key = pair
        if self.of_keys.shape[0] == 1:
            batch = torch.zeros_like(batch)
        return self.of_keys[batch, head, key] - self.of_queries[batch, head, query]


class SumLookUp:
    """A look-up `[batch, head, query, key]` that sums two others."""

    def __init__(self, distance: DistanceLookUp, separable: SeparableLookUp) -> None:
        self.distance = distance
        self.separable = separable

    def __getitem__(self, pair: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        return self.distance[pair] + self.separable[pair]


def look_up(form: FusedForm) -> DistanceLookUp | SeparableLookUp | SumLookUp:
    """Returns the look-up of a form for flex attention's score function; scores are float32 in any model."""
    if isinstance(form, DistanceForm):
        return _of_distance(form)
    if isinstance(form, SeparableForm):
        return _of_terms(form)
    return SumLookUp(_of_distance(form.distance), _of_terms(form.separable))


def _of_distance(form: DistanceForm) -> DistanceLookUp:
    return DistanceLookUp(form.vector.contiguous(), form.query_length)


def _of_terms(form: SeparableForm) -> SeparableLookUp:
    terms = form.terms.contiguous()
    return SeparableLookUp(terms, terms.index_select(-1, form.query_slots))
