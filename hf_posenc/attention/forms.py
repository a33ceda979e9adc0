"""The forms of a bias. Its structure determines how it is passed to an attention function and what it costs.

===========  =====================================================================================
`FusedForm`  a function of distance: one vector per head;
             a number per key minus one per query: softmax is invariant to the second;
             or the sum of one of each
`RowsForm`   anything else: a function that computes the bias of some rows of queries
===========  =====================================================================================

The first kind is fused into an attention kernel (`hf_posenc.attention.fused_attention`). Forms add (`sum_of_forms`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from hf_posenc.attention.block_attention import for_kernel, without_empty_rows
from hf_posenc.schemes.parts import DistanceBias, OtherHeads, rows_of_terms
from hf_posenc.schemes.weights import exporting, gradients_may_be_shared

#: Layers with and without a window have different masks. Accelerate copies masks for every layer on another device.
MOST_MATRICES = 4


@dataclass(frozen=True)
class FusedForm:
    """A function of distance, a number per key, or the sum of both.

    Args:
        vector: `(heads, query_len + key_len - 1)` float32, by rising distance: query i and key j have
            `vector[:, j - i + query_len - 1]`; `None` without a function of distance.
        query_length: number of queries.
        key_length: number of keys.
        slopes: `(heads,)` float32 if the bias of every earlier key is `slope * distance`.
        of_layers: whether several layers may share it; false if many forms came before it in this call.
        terms: `(batch or 1, heads, key_len)` float32, of which query i gets `terms[j] - terms[i]` at every key j that
            it sees; `None` without a number per key.
        query_slots: `(query_len,)` int64, which of the keys belongs to the same token as each query; with `terms`.
    """

    vector: Tensor | None
    query_length: int
    key_length: int
    slopes: Tensor | None = None
    of_layers: bool = True
    terms: Tensor | None = None
    query_slots: Tensor | None = None

    @classmethod
    def of_keys(cls, terms: Tensor, query_slots: Tensor) -> FusedForm:
        """A number per key alone."""
        return cls(None, query_slots.shape[0], terms.shape[-1], terms=terms, query_slots=query_slots)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.terms.shape[1] if self.terms is not None else cast("Tensor", self.vector).shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether the bias is learned."""
        return any(tensor is not None and tensor.requires_grad for tensor in (self.vector, self.terms))

    def rows(self, start: int = 0, stop: int | None = None, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        of_keys = None
        if self.terms is not None and self.query_slots is not None:
            slots = self.query_slots if self.query_length == 1 else self.query_slots[start:stop]
            of_keys = rows_of_terms(self.terms, slots, key_count)
        if self.vector is None:
            return cast("Tensor", of_keys)
        stop = self.query_length if stop is None else stop
        if self.query_length == 1:
            rows = self.vector[None, :, None]
            rows = rows if key_count is None else rows[..., :key_count]
        elif exporting() or torch.compiler.is_compiling():
            # A view would fix the length that the graph was made with.
            keys = torch.arange(self.key_length, device=self.vector.device)[:key_count]
            queries = torch.arange(start, stop, device=self.vector.device).unsqueeze(-1)
            rows = self.vector[:, keys - queries + self.query_length - 1].unsqueeze(0)
        else:
            near = self.vector[:, self.query_length - stop : self.query_length - start + self.key_length - 1]
            rows = near.unfold(-1, self.key_length, 1)[..., :key_count].flip(-2).unsqueeze(0)
        return rows if of_keys is None else rows + of_keys

    def of_first(self, key_length: int) -> FusedForm:
        """The same bias for the first `key_length` keys only."""
        vector = None if self.vector is None else self.vector[:, : self.query_length + key_length - 1]
        terms = None if self.terms is None else self.terms[..., :key_length]
        return replace(self, vector=vector, terms=terms, key_length=key_length)

    def double(self) -> FusedForm:
        """The same bias in float64."""
        given = (self.vector, self.slopes, self.terms)
        vector, slopes, terms = (None if tensor is None else tensor.double() for tensor in given)
        return replace(self, vector=vector, slopes=slopes, terms=terms)

    def separable(self, query_slots: Tensor | None = None) -> FusedForm | None:
        """Returns a function of distance as a number per key, if possible for all earlier keys.

        Args:
            query_slots: as in this class; the last keys by default.
        """
        if self.slopes is None:
            return None
        slots = torch.arange(self.key_length, device=self.slopes.device)
        if query_slots is None:
            query_slots = slots[self.key_length - self.query_length :]
        return FusedForm.of_keys((self.slopes.unsqueeze(-1) * slots).unsqueeze(0), query_slots)


@dataclass(eq=False)
class RowsForm:
    """A bias that must be computed for every pair.

    Args:
        compute: `(start, stop, key_count)` -> `(batch or 1, heads, stop - start, key_count)` float32 of those queries
            and the first keys.
        query_length: number of queries.
        key_length: number of keys.
        heads: number of query heads.
        other: if it replaces the logits of each query with its first keys by those of other heads: these heads, and how
            many keys of each query they are for.
    """

    compute: Callable[[int, int, int], Tensor]
    query_length: int
    key_length: int
    heads: int
    other: OtherHeads | None = None

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
    return start.clamp(min=0) if isinstance(start, Tensor) else max(start, 0)


def distance_form(
    bias: DistanceBias, offset: int | Tensor, query_length: int, key_length: int, device: torch.device
) -> FusedForm:
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
    return FusedForm(vector, query_length, key_length, slopes)


BiasForm = FusedForm | RowsForm


def sum_of_forms(forms: Sequence[BiasForm], causal: bool) -> BiasForm:
    """Returns the most specific form of the sum of several biases of one call.

    Args:
        forms: at least two, each of one kind.
        causal: whether no query sees a later key, so that a linear distance bias is a number per key.
    """
    if any(isinstance(form, RowsForm) for form in forms):

        def compute(start: int, stop: int, key_count: int) -> Tensor:
            return functools.reduce(torch.add, (form.rows(start, stop, key_count) for form in forms))

        return RowsForm(compute, forms[0].query_length, forms[0].key_length, forms[0].heads)
    fused = [cast("FusedForm", form) for form in forms]
    slots = next((form.query_slots for form in fused if form.terms is not None), None)
    if causal and slots is not None:
        linear = [form.separable(slots) if form.terms is None else form for form in fused]
        fused = fused if None in linear else cast("list[FusedForm]", linear)
    vectors, terms, slopes = zip(*((form.vector, form.terms, form.slopes) for form in fused), strict=True)
    return FusedForm(
        _total(vectors),
        forms[0].query_length,
        forms[0].key_length,
        None if any(slope is None for slope in slopes) else _total(slopes),
        all(form.of_layers for form in fused),
        _total(terms),
        slots,
    )


def _total(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of those that are not `None`."""
    present = [tensor for tensor in tensors if tensor is not None]
    return functools.reduce(torch.add, present) if present else None


def without_later_keys(form: BiasForm, first: int) -> BiasForm:
    """Returns the same bias with the smallest number where a key comes after a query.

    Args:
        form: the bias.
        first: the key of the first query's own token; the next query's own is the next key.
    """
    if isinstance(form, FusedForm) and form.vector is not None and form.terms is None:
        earliest = 1 - form.query_length - first
        later = torch.arange(earliest, earliest + form.vector.shape[-1], device=form.vector.device) > 0
        return replace(form, vector=form.vector.masked_fill(later, torch.finfo(form.vector.dtype).min), slopes=None)

    def compute(start: int, stop: int, key_count: int) -> Tensor:
        rows = form.rows(start, stop, key_count)
        query_slots = first + torch.arange(start, stop, device=rows.device)
        later = torch.arange(key_count, device=rows.device) > query_slots.unsqueeze(-1)
        return rows.masked_fill(later, torch.finfo(rows.dtype).min)

    return RowsForm(compute, form.query_length, form.key_length, form.heads)


def has_shared_rows(form: BiasForm) -> bool:
    """Whether layers may share the rows of a bias: a function of distance, unless each layer needs its gradient."""
    if not isinstance(form, FusedForm) or form.terms is not None:
        return False
    return not form.requires_grad or gradients_may_be_shared()


def masked_rows(
    form: BiasForm, mask: Tensor | None, empty: Tensor | None, start: int, stop: int, seen: int, query: Tensor
) -> Tensor:
    """Rows of a bias with the smallest number at hidden pairs, in the dtype that the kernel takes.

    Args:
        form: the bias.
        mask: of `mask_of_rows`.
        empty: of `rows_without_keys`.
        start: the first query.
        stop: the end of the queries (exclusive).
        seen: the number of keys.
        query: `(batch, heads, query_len, head_dim)`. Only its dtype and device matter.
    """
    converts = False
    if not query.is_cpu and isinstance(form, FusedForm) and form.vector is not None and form.terms is None:
        converts = not form.vector.requires_grad
        if converts and (mask is None or mask.dtype == torch.bool):
            # Before there is a number for every pair. The sum with an additive mask may be too small for float16.
            form = replace(form, vector=for_kernel(form.vector, query))
    bias = with_mask(form.rows(start, stop, seen), mask)
    bias = bias if empty is None else without_empty_rows(bias, empty)
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
