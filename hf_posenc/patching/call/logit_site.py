"""The changes that a scheme makes to the logits of one attention layer: distance biases, and the scale.

A distance bias is computed from slots where distances between slots equal those between positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hf_posenc.attention.block_attention import without_autocast
from hf_posenc.attention.blockwise import SIZES
from hf_posenc.attention.forms import BiasForm, FusedForm, RowsForm, distance_form, first_key_slot, sum_of_forms
from hf_posenc.attention.scores import Factor
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache_checks import check_cache
from hf_posenc.patching.call.forward_state import FEW_TOKENS, ForwardState, parts_of_kind
from hf_posenc.patching.call.key_positions import (
    bound_of_unread,
    key_positions,
    positions_never_decrease,
    require_window,
    shifts,
    slot_distances_are_exact,
)
from hf_posenc.patching.forwards import PlacedForward
from hf_posenc.schemes.parts import HIDDEN, DistanceBias, LogitBias, PairwiseBias, Part
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.weights import KeptValues, assert_in_graph, traced

if TYPE_CHECKING:
    from hf_posenc.attention.backends import MatrixKernel
    from hf_posenc.patching.call.attention_site import LayerCall

#: Of `query . key`, of the query and of the key.
Factors = tuple[Factor, Factor, Factor]
_UNEVEN = (
    "The positions have gaps between tokens that see each other (from position_ids or from padding between them), but "
    "a compiled graph uses the distances between slots. Run this call without torch.compile."
)


class LogitSite(PlacedForward):
    """Computes the changes that a scheme makes to the logits of one attention module.

    The module is an ordinary attribute, so that deep copies and pickles of a site refer to the copied module.
    """

    #: Whether the mask of a call is known, so that a causal layer without one lets no query see later keys.
    knows_mask = False

    def check_head_count(self, query: Tensor) -> None:
        """Checks the number of heads if the scheme has values for individual heads."""
        encoding = self.encoding
        if query.shape[1] == encoding.num_heads:
            return
        if encoding.shard is not None or any(next(part.parameters(), None) is not None for part in encoding.parts):
            check_heads(encoding.num_heads, query.shape[1])

    def bias(
        self,
        call: LayerCall,
        query: Tensor,
        key: Tensor,
        factors: Factors,
        mask: Any = None,
        folds: bool = False,
        rotated: bool = False,
    ) -> BiasForm:
        """The bias of one call, including the logit scale, in the most specific form available.

        Args:
            call: the call in progress.
            query: `(batch, heads, query_len, width)`, mapped, before the scale.
            key: `(batch, key_value_heads, key_len, width)`, mapped.
            factors: the layer's factor of `query . key`, and what it has already multiplied `query` and `key` with. A
                factor is a tensor that fits the logits if heads differ.
            mask: the mask passed to the attention function, if known.
            folds: whether the attention function takes no bias but one that is folded into queries and keys.
            rotated: whether the attention function receives the heads that `rotated_by_input` returns, so that these
                rotations are left out. There must be another summand.
        """
        bias, state = self.encoding.logit_bias, call.state
        assert bias is not None
        if state.sequence is not None:
            state.require_whole(f"{type(self.module).__name__} does not call an attention function")
        summands = [part for part in self.encoding.summands if not (rotated and part.rotates_heads)]
        read_pairs = [part for part in summands if not isinstance(part, DistanceBias)]
        of_pairs = self.pairwise_forms(call, query, key, factors, read_pairs) if read_pairs else {}
        forms = [
            self.distance_form_of(part, state, query, key, mask, folds)
            if isinstance(part, DistanceBias)
            else of_pairs[part]
            for part in summands
        ]
        form = forms[0] if len(forms) == 1 else sum_of_forms(forms, self.encoding.causal)
        check_heads(form.heads, query.shape[1])
        return form if self.encoding.logit_scale is None else self._scaled_form(form, state)

    def pairwise_forms(
        self, call: LayerCall, query: Tensor, key: Tensor, factors: Factors, summands: Sequence[LogitBias]
    ) -> dict[LogitBias, BiasForm]:
        """The forms of summands that are no distance biases, for the arguments of the method `bias`."""
        raise NotImplementedError

    def _scaled_form(self, form: BiasForm, state: ForwardState) -> RowsForm:
        scale, bias = self.scale(state), self.encoding.logit_bias
        hides = isinstance(bias, PairwiseBias) and bias.hides_pairs

        def compute(start: int, stop: int, key_count: int) -> Tensor:
            of_rows = scale[..., start:stop].unsqueeze(-1) if isinstance(scale, Tensor) else scale
            rows = form.rows(start, stop, key_count)
            # A learned scale may be 0 or negative, and a blend gives hidden pairs a part of `HIDDEN`.
            return torch.where(rows > HIDDEN / 1e6, rows * of_rows, rows) if hides else rows * of_rows

        return RowsForm(compute, form.query_length, form.key_length, form.heads)

    def scale(self, state: ForwardState) -> Tensor | float:
        """`(batch or 1, heads or 1, query_len)` float32, or a number for all queries."""
        logit_scale = self.encoding.logit_scale
        assert logit_scale is not None
        if logit_scale.factor_of_all is not None:
            return logit_scale.factor_of_all

        def compute() -> Tensor:
            check_cache(logit_scale, state)
            factor: Tensor = state.replica(logit_scale)(state.positions())
            if factor.ndim != 3:
                raise wrong_shape(logit_scale, factor, "(batch or 1, heads or 1, length)")
            return factor

        return state.shared("scale", compute, part=logit_scale)

    def scaled(self, state: ForwardState, query: Tensor) -> Tensor:
        """The query times its scale, `(batch, heads, query_len, width)`."""
        factor = self.scale(state)
        if not isinstance(factor, Tensor):
            return query * factor
        if factor.shape[1] != 1:
            check_heads(factor.shape[1], query.shape[1])
        return query * factor.unsqueeze(-1).to(query.dtype)

    def key_start(self, state: ForwardState, query_length: int, key_length: int) -> tuple[int | Tensor, int | Tensor]:
        """Slots of the first query and of the first key."""
        offset = key_length - query_length if state.offset is None else state.offset
        first = first_key_slot(offset, query_length, key_length)
        if isinstance(first, int) and first > 0:
            require_window(state)
        return offset, first

    def _places(
        self, state: ForwardState, query_length: int, key_length: int, as_cached: bool = False
    ) -> tuple[Positions, Tensor]:
        """The positions of the keys, and for each query the index of the key of the same token."""

        def find() -> tuple[Positions, Tensor]:
            query_start, key_start = self.key_start(state, query_length, key_length)
            slots = torch.arange(query_length, device=state.device) + (query_start - key_start)
            return key_positions(state, key_start, key_length, as_cached), slots

        return state.shared(("pairs", as_cached), find, query_length, key_length)

    def distance_form_of(
        self, bias: DistanceBias, state: ForwardState, query: Tensor, key: Tensor, mask: Any, folds: bool
    ) -> BiasForm:
        """The form of a distance bias, for the arguments of the method `bias`; layers with the same part share it."""
        query_length, key_length, device = query.shape[-2], key.shape[-2], query.device

        # Few pairs are looked up by their positions, which is faster than to read whether a mask has gaps.
        few = device.type != "cpu" and not folds and query_length * key_length <= SIZES[False].short_pairs
        few = few and not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in bias.parameters()))

        def find() -> tuple[int | Tensor, bool | Tensor | None]:
            offset, first = self.key_start(state, query_length, key_length)
            if few and bound_of_unread(state) is not None:
                return offset, None
            return offset, slot_distances_are_exact(state, first, key_length, mask)

        offset: int | Tensor = 0
        of_slots: bool | Tensor | None = True
        given = state.position_ids is not None or state.attention_mask is not None or state.cache_object is not None
        if given or not isinstance(state.offset, int) or state.offset != 0:
            offset, of_slots = state.shared(("slots", few), find, query_length, key_length, mask=mask)
        if of_slots is None:
            return self._form_of_counts(bias, state, query_length, key_length)
        if isinstance(of_slots, Tensor) and query_length > 1:
            # A compiled graph cannot branch on it, and a bias of all pairs by position would be a full matrix there.
            assert_in_graph(of_slots, _UNEVEN)
        elif of_slots is not True:
            # With a batch size of 1 and without a mask, flash kernels are told where packed documents begin.
            restarts = mask is None and query.shape[0] == 1
            return self._form_of_positions(bias, state, query_length, key_length, folds, restarts)

        def compute() -> FusedForm:
            kept = self.kept_row(bias, state, key_length) if query_length == 1 else None
            if kept is not None:
                return FusedForm(kept[0][0, :, 0], 1, key_length, kept[1])
            joins = bias in self.encoding.joined
            vector = self._vector_of_layers(state, query_length, key_length, mask) if joins else None
            if vector is not None:
                return FusedForm(vector, query_length, key_length)
            form = distance_form(state.replica(bias), offset, query_length, key_length, device)
            shared = torch.compiler.is_compiling() or state.may_be_of_layers()
            return form if shared else dataclasses.replace(form, of_layers=False)

        return state.shared("bias", compute, query_length, key_length, part=bias)

    def kept_row(self, bias: DistanceBias, state: ForwardState, key_length: int) -> tuple[Tensor, Tensor | None] | None:
        """The bias of a single query that is the newest token, from values of twice the length that a cache keeps.

        Returns:
            `(batch or 1, heads, 1, key_len)`, and its slopes, if any. `None` if they cannot be kept: with gradients, in
            a compiled graph, without a cache, or if there are keys after the query, as in a static cache.
        """
        kept, offset = cast("KeptValues | None", state.memo.get(KeptValues)), state.offset
        if kept is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or not isinstance(offset, int):
            return None
        if key_length > offset + 1:
            return None
        name = ("kept row", key_length, state.device)
        if (*name, id(bias)) not in state.scratch:
            biases = parts_of_kind(self, "logit_bias") if bias in self.encoding.joined else [bias]

            def compute() -> tuple[Tensor, list[Tensor | None]]:
                replicas = [state.replica(each) for each in biases]
                distances = torch.arange(1 - 2 * key_length, 1, device=state.device)
                slopes = [each.slopes_behind(distances.device) if each.states_slopes else None for each in replicas]
                with without_autocast(distances.device):
                    return torch.stack([each(distances) for each in replicas])[:, None, :, None], slopes

            what = f"bias on {state.device}"
            values, slopes = kept.of(biases, what, compute, lambda known: known[0].shape[-1] >= key_length)
            values = values.narrow(-1, values.shape[-1] - key_length, key_length)
            if values.device.type != "cpu" and bound_of_unread(state) is not None:
                keys = key_positions(state, offset + 1 - key_length, key_length).ids
                index = (keys - state.positions().ids + (key_length - 1)).clamp(min=0)
                values, slopes = values[:, 0, :, 0, index].transpose(1, 2).unsqueeze(-2), [None] * len(biases)
            rows = zip(biases, values.unbind(0), slopes, strict=True)
            state.scratch.update({(*name, id(each)): (row, of_each) for each, row, of_each in rows})
        return cast("tuple[Tensor, Tensor | None]", state.scratch[*name, id(bias)])

    def rows_of_layers(
        self, state: ForwardState, kernel: MatrixKernel, mask: Any, pairs: Callable[[], AttentionPairs] | None
    ) -> Tensor | None:
        """`(batch or 1, heads, query_len, key_len)`: the rows of the bias with the mask, computed with other layers.

        Args:
            state: of the call.
            kernel: the attention, which has the mask.
            mask: the mask of the call.
            pairs: returns the pairs of the bias; `None` for a function of the distance between slots.

        Returns:
            `None` if the layer computes its own rows.
        """
        if self.encoding.logit_scale is not None or (mask is not None and mask.shape[0] > 1):
            return None  # The rows of all layers and sequences would take too much memory at once.
        if pairs is None:
            return self._vector_of_layers(state, *kernel.lengths, mask, kernel)
        joined = state.together(self, "logit_bias", lambda: (pairs(),), *kernel.lengths, kernel=kernel)
        return cast("Tensor | None", joined)

    def _vector_of_layers(
        self, state: ForwardState, query_length: int, key_length: int, mask: Any, kernel: MatrixKernel | None = None
    ) -> Tensor | None:
        """The bias of all distances, `(heads, query_len + key_len - 1)`, computed with other layers for its gradient.

        With a kernel it returns the rows of the bias with the mask. Biases of later keys are 0 if no query sees any.
        Without gradients each layer computes its own, so that rounding does not depend on whether positions have gaps.
        """
        if query_length + key_length > FEW_TOKENS or not torch.is_grad_enabled():
            return None
        # A query without keys has the mean of all values in modules that compute their scores, later ones included.
        all_see_keys = mask is None and state.attention_mask is None
        unseen = query_length - 1 if all_see_keys and self.encoding.causal and self.knows_mask else 0

        def distances() -> tuple[Tensor]:
            offset, first = self.key_start(state, query_length, key_length)
            count = query_length + key_length - 1
            return (torch.arange(count - unseen, device=state.device) + (first - offset - query_length + 1),)

        lengths = (query_length, key_length)
        joined = state.together(self, "logit_bias", distances, *lengths, padding=unseen, kernel=kernel)
        return cast("Tensor | None", joined)

    def _form_of_counts(self, bias: DistanceBias, state: ForwardState, query_length: int, key_length: int) -> RowsForm:
        """The distance bias of few pairs whose positions have a bound."""
        repeated = self.encoding.repeats_bias

        def rows() -> Tensor:
            kept = self.kept_row(bias, state, key_length) if query_length == 1 else None
            if kept is not None:
                return kept[0]
            index, span = self._counted(state, query_length, key_length)
            distances = torch.arange(-span, span + 1, device=state.device)
            values = state.shared("counted", lambda: state.replica(bias)(distances), span, part=bias)
            return values[:, index].transpose(0, 1)

        def compute(start: int, stop: int, key_count: int) -> Tensor:
            lengths = (query_length, key_length)
            every = state.shared("counted rows", rows, *lengths, part=bias) if repeated else rows()
            return every[..., start:stop, :key_count]

        return RowsForm(compute, query_length, key_length, self.encoding.num_heads)

    def _counted(self, state: ForwardState, query_length: int, key_length: int) -> tuple[Tensor, int]:
        """`(batch, query_len, key_len)`: the distances of pairs plus a bound of them, and this bound."""
        span = bound_of_unread(state)
        assert span is not None

        def compute() -> Tensor:
            keys, slots = self._places(state, query_length, key_length)
            ids = keys.ids if state.of_grid else _with_places_of_padding(keys.ids)
            distances = ids.unsqueeze(-2) - ids.index_select(-1, slots).unsqueeze(-1)
            return (distances + span).clamp(0, 2 * span)

        return state.shared("counted", compute, query_length, key_length), span

    def _form_of_positions(
        self, bias: DistanceBias, state: ForwardState, query_length: int, key_length: int, folds: bool, restarts: bool
    ) -> BiasForm:
        """The distance bias when distances between positions differ from those between slots, which is slower.

        Distances are subtracted as integers and then scaled. A number per key would be rounded at the size of the
        positions, so that a far token would cost near ones their precision. Only kernels without a bias receive it.
        """
        _, first = self.key_start(state, query_length, key_length)
        keys, query_slots = self._places(state, query_length, key_length)
        own_bias, linear = state.replica(bias), folds and self.encoding.causal
        slopes = own_bias.slopes_behind(keys.ids.device) if linear and own_bias.states_slopes else None
        if slopes is not None and not traced() and positions_never_decrease(state, keys, first, restarts):
            # Relative to the first position, so that no later token changes the values of earlier ones.
            steps = keys.ids - keys.ids.clamp(min=0).amin(-1, keepdim=True)
            return FusedForm.of_keys(slopes.unsqueeze(-1) * steps.unsqueeze(1), query_slots)

        queries = keys.ids.index_select(-1, query_slots)
        return form_of_places([own_bias], queries, keys.ids, self.encoding.num_heads)


def _with_places_of_padding(ids: Tensor) -> Tensor:
    """Positions `(batch or 1, length)` in which padding continues those of real tokens, if none of these has gaps.

    The bias of padding then equals that by slots. It has no use, but outputs at padding are the same on all devices.
    """
    slots, real = torch.arange(ids.shape[1], device=ids.device), ids >= 0
    least, most = shifts(ids, real)
    gaps = (most > least).any()
    return ids.where(real | gaps, slots + most.unsqueeze(-1))


def form_of_places(biases: Sequence[DistanceBias], queries: Tensor, keys: Tensor, heads: int) -> RowsForm:
    """The sum of distance biases, computed for every pair.

    Args:
        biases: the biases, on the device of the positions.
        queries: `(batch or 1, query_len)`, the positions of the queries.
        keys: `(batch or 1, key_len)`, those of the keys.
        heads: number of heads.
    """

    def compute(start: int, stop: int, key_count: int) -> Tensor:
        distance = keys[:, None, :key_count] - queries[:, start:stop, None]
        with without_autocast(distance.device):
            per_head: Tensor = functools.reduce(torch.add, (bias(distance) for bias in biases))
        return per_head.transpose(0, 1)

    return RowsForm(compute, queries.shape[-1], keys.shape[-1], heads)


def wrong_shape(part: Part, values: Tensor, expected: str) -> ValueError:
    """The error for a custom part that returns values with another number of axes, which torch might broadcast."""
    return ValueError(f"{type(part).__name__} returned the shape {tuple(values.shape)}; expected {expected}.")


def check_heads(of_scheme: int, of_layer: int) -> None:
    """Requires the scheme to have as many heads as the layer."""
    if of_scheme != of_layer:
        raise UnsupportedError(
            f"The scheme has separate values for each of {of_scheme} heads, but this layer computes {of_layer} heads. "
            "If the heads are split across processes, let transformers split them (from_pretrained with tp_plan): with "
            "torch's parallelize_module, or weights split by hand, it is unknown which heads a process has. If they "
            "are not split, the scheme was built for another architecture: call patch_model again."
        )
