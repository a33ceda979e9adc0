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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_posenc.attention.block_attention import for_kernel, rows_without_keys, without_empty_rows
from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.positions import exporting, gradients_may_be_shared

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
        of_layers: whether several layers may share it; false if many forms came before it in this call.
    """

    vector: Tensor
    query_length: int
    key_length: int
    slopes: Tensor | None = None
    of_layers: bool = True

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
        """The same bias for the first `key_length` keys only."""
        return replace(self, vector=self.vector[:, : self.query_length + key_length - 1], key_length=key_length)

    def double(self) -> DistanceForm:
        """The same bias in float64."""
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
        """The same bias for the first `key_length` keys only."""
        return SeparableForm(self.terms[..., :key_length], self.query_slots)

    def double(self) -> SeparableForm:
        """The same bias in float64."""
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
        """The same bias for the first `key_length` keys only."""
        return SumForm(self.distance.of_first(key_length), self.separable.of_first(key_length))

    def double(self) -> SumForm:
        """The same bias in float64."""
        return SumForm(self.distance.double(), self.separable.double())

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        return self.distance.rows(start, stop, key_count) + self.separable.rows(start, stop, key_count)


@dataclass(eq=False)
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
        """Returns the same bias for the first `key_length` keys only; no query sees later ones."""
        return replace(self, key_length=key_length)

    def double(self) -> RowsForm:
        """The same bias in float64."""
        return RowsForm(lambda *rows: self.compute(*rows).double(), self.query_length, self.key_length, self.heads)

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys.

        If fewer than all keys are requested, no query may see the others.
        """
        stop = self.query_length if stop is None else stop
        return self.compute(start, stop, self.key_length if key_count is None else key_count)


def first_key_slot(offset: int | Tensor, query_length: int, key_length: int) -> int | Tensor:
    """Returns the slot of the first key that reached the attention function.

    Dynamic caches return every slot; static caches too, padded at the end; sliding caches only the last `key_length`
    slots up to the newest query.
    """
    start = offset + query_length - key_length
    if isinstance(start, Tensor):
        return start.clamp(min=0)
    return max(start, 0)


def distance_form(
    bias: DistanceBias, offset: int | Tensor, query_length: int, key_length: int, device: torch.device
) -> DistanceForm:
    """Evaluates a bias at every distance that occurs.

    Args:
        bias: the scheme's part.
        offset: slot of the first query.
        query_length: number of queries.
        key_length: number of keys.
        device: device of the result.
    """
    farthest = first_key_slot(offset, query_length, key_length) - offset - (query_length - 1)
    distances = torch.arange(query_length + key_length - 1, device=device) + farthest
    # Torch's fused kernels refuse a mask whose rows are not contiguous. Tables give one number per head for a distance.
    vector = bias(distances).contiguous()
    slopes = bias.slopes_behind(device) if bias.states_slopes else None
    return DistanceForm(vector, query_length, key_length, slopes)


FusedForm = DistanceForm | SeparableForm | SumForm
BiasForm = FusedForm | RowsForm


def sum_of_forms(forms: Sequence[BiasForm], query_length: int, key_length: int, causal: bool) -> BiasForm:
    """Returns the most specific form of the sum of several biases of one call.

    Args:
        forms: at least two, and no `SumForm`.
        query_length: number of queries.
        key_length: number of keys.
        causal: whether no query sees a later key, so that a linear distance bias is a number per key.
    """
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


def without_later_keys(form: BiasForm, first: int, query_length: int, key_length: int) -> BiasForm:
    """Returns the same bias with the smallest number where a key comes after a query.

    Args:
        form: the bias.
        first: the key of the first query's own token; the next query's own is the next key.
        query_length: number of queries.
        key_length: number of keys.
    """
    if isinstance(form, DistanceForm):
        earliest = 1 - query_length - first
        later = torch.arange(earliest, earliest + form.vector.shape[-1], device=form.vector.device) > 0
        return replace(form, vector=form.vector.masked_fill(later, torch.finfo(form.vector.dtype).min), slopes=None)

    def compute(start: int, stop: int, key_count: int) -> Tensor:
        rows = form.rows(start, stop, key_count)
        own = first + torch.arange(start, stop, device=rows.device)
        later = torch.arange(key_count, device=rows.device) > own.unsqueeze(-1)
        return rows.masked_fill(later, torch.finfo(rows.dtype).min)

    return RowsForm(compute, query_length, key_length, form.heads)


def has_shared_rows(form: BiasForm) -> bool:
    """Whether layers may share the rows of a bias: a function of distance, unless each layer needs its gradient."""
    return isinstance(form, DistanceForm) and (not form.requires_grad or gradients_may_be_shared())


def masked_rows(
    form: BiasForm, mask: Tensor | None, causal: bool, start: int, stop: int, seen: int, query: Tensor
) -> Tensor:
    """Rows of a bias with the smallest number at hidden pairs, in the dtype that the kernel takes.

    Args:
        form: the bias.
        mask: boolean (visible pairs) or additive, or `None`.
        causal: whether query i sees no key after key i.
        start: the first query.
        stop: the end of the queries (exclusive).
        seen: the number of keys.
        query: `(batch, heads, query_len, head_dim)`. Only its dtype and device matter.
    """
    converts = not query.is_cpu and isinstance(form, DistanceForm) and not form.requires_grad
    if isinstance(form, DistanceForm) and converts and (mask is None or mask.dtype == torch.bool):
        # Converted before there is a number for every pair. The sum with an additive mask may be too small for float16.
        form = replace(form, vector=for_kernel(form.vector, query))
    bias = form.rows(start, stop, seen)
    own = mask_of_rows(mask, causal, start, stop, seen, bias.device)
    bias = with_mask(bias, own)
    if mask is not None and own is not None:
        bias = without_empty_rows(bias, rows_without_keys(own))
    return for_kernel(bias, query) if converts else bias


def with_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A bias with the smallest number at hidden pairs. An additive mask is added."""
    if mask is None or mask.dtype != torch.bool:
        return bias if mask is None else bias + mask
    # Not a sum, because a scheme may compute any number for hidden pairs.
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def mask_of_rows(
    mask: Tensor | None, causal: bool, start: int, stop: int, seen: int, device: torch.device
) -> Tensor | None:
    """The rows of the given mask, or else of a causal one; `None` if every query sees all keys."""
    if mask is not None:
        return (mask[:, :, start:stop] if mask.shape[2] > 1 else mask)[..., :seen]
    if not causal:
        return None
    rows = torch.arange(start, stop, device=device)
    return (torch.arange(seen, device=device) <= rows.unsqueeze(-1)).view(1, 1, stop - start, seen)
