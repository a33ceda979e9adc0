"""The forms of a bias. Its structure determines how it is passed to an attention function and what it costs.

========================  ==================================================================================
`DistanceForm`            a function of distance: one vector per head
`SeparableForm`           a number per key minus one per query; softmax is invariant to the second
`SumForm`                 the sum of one of each
`RowsForm`                anything else: a function that computes the bias of some rows of queries
========================  ==================================================================================

The first three are fused into an attention kernel (`hf_posenc.attention.fused_attention`). Forms add (`sum_of_forms`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_posenc.schemes.positions import exporting

#: Layers with and without a window have different masks. Accelerate copies masks for every layer on another device.
MOST_MATRICES = 4


@dataclass(frozen=True)
class DistanceForm:
    """A bias that depends only on distance.

    Args:
        vector: `(heads, query_len + key_len - 1)` float32, by rising distance: query i and key j have
            `vector[:, j - i + query_len - 1]`.
        query_length: number of queries.
        key_length: number of keys.
        slopes: `(heads,)` float32 if the bias of every earlier key is `slope * distance`.
        of_layers: whether several layers may have it: not if many forms came before it in this call.
        matrices: rows of it with masks, and what they were made with. Forms that are derived from this one share them.
    """

    vector: Tensor
    query_length: int
    key_length: int
    slopes: Tensor | None = None
    of_layers: bool = True
    matrices: dict[Hashable, tuple[Tensor, Tensor | None]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, None, None]:
        """The vector, the terms and the query slots, as the fused kernels take them."""
        return self.vector, None, None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.vector.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether the bias is learned."""
        return self.vector.requires_grad

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        stop = self.query_length if stop is None else stop
        if self.query_length == 1:
            row = self.vector[None, :, None]
            return row if key_count is None else row[..., :key_count]
        if exporting() or torch.compiler.is_compiling():
            # A view would fix the length that the graph was made with.
            keys = torch.arange(self.key_length, device=self.vector.device)[:key_count]
            queries = torch.arange(start, stop, device=self.vector.device).unsqueeze(-1)
            return self.vector[:, keys - queries + self.query_length - 1].unsqueeze(0)
        own = self.vector[:, self.query_length - stop : self.query_length - start + self.key_length - 1]
        return own.unfold(-1, self.key_length, 1)[..., :key_count].flip(-2).unsqueeze(0)

    def of_first(self, key_length: int) -> DistanceForm:
        """The same for the first `key_length` keys only."""
        return replace(self, vector=self.vector[:, : self.query_length + key_length - 1], key_length=key_length)

    def double(self) -> DistanceForm:
        """The same in float64."""
        return replace(self, vector=self.vector.double(), slopes=None if self.slopes is None else self.slopes.double())

    def separable(self, query_slots: Tensor | None = None) -> SeparableForm | None:
        """Returns the same bias as a number per key, if possible for all earlier keys.

        Args:
            query_slots: which of the keys belongs to the same token as each query; the last ones by default.
        """
        if self.slopes is None:
            return None
        slots = torch.arange(self.key_length, device=self.vector.device)
        if query_slots is None:
            query_slots = slots[self.key_length - self.query_length :]
        return SeparableForm((self.slopes.unsqueeze(-1) * slots).unsqueeze(0), query_slots)


@dataclass(frozen=True)
class SeparableForm:
    """`terms[j] - terms[i]` for query i and every key j that it sees.

    Args:
        terms: `(batch or 1, heads, key_len)` float32.
        query_slots: `(query_len,)` int64, which of the keys belongs to the same token as each query.
    """

    terms: Tensor
    query_slots: Tensor

    @property
    def tensors(self) -> tuple[None, Tensor, Tensor]:
        """The vector, the terms and the query slots, as the fused kernels take them."""
        return None, self.terms, self.query_slots

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.terms.shape[1]

    @property
    def requires_grad(self) -> bool:
        """Whether the bias is learned."""
        return self.terms.requires_grad

    def of_first(self, key_length: int) -> SeparableForm:
        """The same for the first `key_length` keys only."""
        return SeparableForm(self.terms[..., :key_length], self.query_slots)

    def double(self) -> SeparableForm:
        """The same in float64."""
        return SeparableForm(self.terms.double(), self.query_slots)

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        if self.query_slots.shape[0] == 1:
            # Uses the minimum number of operators in a decoding step, where calls cost more than the computation.
            own = self.terms.index_select(-1, self.query_slots)
            terms = self.terms if key_count is None else self.terms[..., :key_count]
            return (terms - own).unsqueeze(-2)
        own = self.terms.index_select(-1, self.query_slots[start:stop])
        return self.terms[..., :key_count].unsqueeze(-2) - own.unsqueeze(-1)


@dataclass(frozen=True)
class SumForm:
    """The sum of a distance bias and a number per key.

    Args:
        distance: the distance bias.
        separable: the number per key.
    """

    distance: DistanceForm
    separable: SeparableForm

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The vector, the terms and the query slots, as the fused kernels take them."""
        return self.distance.vector, self.separable.terms, self.separable.query_slots

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.distance.heads

    @property
    def requires_grad(self) -> bool:
        """Whether the bias is learned."""
        return self.distance.requires_grad or self.separable.requires_grad

    def of_first(self, key_length: int) -> SumForm:
        """The same for the first `key_length` keys only."""
        return SumForm(self.distance.of_first(key_length), self.separable.of_first(key_length))

    def double(self) -> SumForm:
        """The same in float64."""
        return SumForm(self.distance.double(), self.separable.double())

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        return self.distance.rows(start, stop, key_count) + self.separable.rows(start, stop, key_count)


@dataclass(frozen=True)
class RowsForm:
    """A bias that must be computed for every pair.

    Args:
        compute: `(start, stop, key_count)` -> `(batch or 1, heads, stop - start, key_count)` float32 of those queries
            and the first keys.
        query_length: number of queries.
        key_length: number of keys.
        heads: number of query heads.
    """

    compute: Callable[[int, int, int], Tensor]
    query_length: int
    key_length: int
    heads: int

    def of_first(self, key_length: int) -> RowsForm:
        """Returns the same for the first `key_length` keys only; no query sees later ones."""
        return RowsForm(self.compute, self.query_length, key_length, self.heads)

    def double(self) -> RowsForm:
        """The same in float64."""
        return RowsForm(lambda *rows: self.compute(*rows).double(), self.query_length, self.key_length, self.heads)

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys.

        If fewer than all keys are requested, no query may see the others.
        """
        stop = self.query_length if stop is None else stop
        return self.compute(start, stop, self.key_length if key_count is None else key_count)


FusedForm = DistanceForm | SeparableForm | SumForm
BiasForm = FusedForm | RowsForm


def sum_of_forms(forms: Sequence[BiasForm], query_length: int, key_length: int, causal: bool) -> BiasForm:
    """Returns the most specific form of the sum of several biases of one call.

    Args:
        forms: at least one, and no `SumForm`.
        query_length: number of queries.
        key_length: number of keys.
        causal: whether no query sees a later key, so that a linear distance bias is a number per key.
    """
    if len(forms) == 1:
        return forms[0]
    if any(isinstance(form, RowsForm) for form in forms):

        def compute(start: int, stop: int, key_count: int) -> Tensor:
            return _total([form.rows(start, stop, key_count) for form in forms])

        return RowsForm(compute, query_length, key_length, forms[0].heads)
    distances = [form for form in forms if isinstance(form, DistanceForm)]
    separables = [form for form in forms if isinstance(form, SeparableForm)]
    if causal and separables:
        slots = separables[0].query_slots
        linear = [form.separable(slots) for form in distances]
        if all(form is not None for form in linear):
            separables, distances = [*separables, *(form for form in linear if form is not None)], []
    separable = (
        SeparableForm(_total([form.terms for form in separables]), separables[0].query_slots) if separables else None
    )
    if not distances:
        assert separable is not None
        return separable
    slopes = [form.slopes for form in distances]
    distance = DistanceForm(
        _total([form.vector for form in distances]),
        query_length,
        key_length,
        None if any(one is None for one in slopes) else _total([one for one in slopes if one is not None]),
        all(form.of_layers for form in distances),
    )
    return distance if separable is None else SumForm(distance, separable)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)
