"""Positions of the keys of a call, cached ones included, and whether distances between slots equal those of positions.

The positions of new tokens come from the `ForwardState`. Those of cached tokens follow from the mask and the slots,
unless the caller passed other `position_ids`; those are recorded on the cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.patching.call.cache import (
    GENERATION,
    CachedPositions,
    counted_tokens,
    drops_keys,
    record,
    recorded,
    self_attention_cache,
)
from hf_posenc.patching.call.cache_checks import NEGATIVE, negative_positions, refuse_negative
from hf_posenc.patching.call.forward_state import ForwardState, visible_pairs
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.weights import assert_in_graph, exporting, require, traced

#: Number of query-key pairs compared at a time.
_PAIRS = 2**24
_FARTHEST = 2**62


@dataclass
class Regularity:
    """How the positions of one forward call relate to the mask and the slots.

    Args:
        irregular: whether positions differ from those implied by the mask and the slots.
        even: whether all real tokens are as far apart as their slots; a 0-dim boolean tensor in a compiled graph,
            which cannot inspect it; `None` if this was not checked.
    """

    irregular: bool
    even: bool | Tensor | None


def regularity(state: ForwardState) -> Regularity:
    """The regularity of the positions of a call, computed once for all layers.

    Without `position_ids`, no tensor on a device is read. With them, the flags of a call are read once if it has a
    cache, on which the positions are recorded.

    Raises:
        UnsupportedError: if the positions of cached tokens cannot be determined.
    """
    return state.shared("regularity", lambda: _compute_regularity(state), everywhere=True)


def key_positions(state: ForwardState, first_slot: int | Tensor, key_length: int, as_cached: bool = False) -> Positions:
    """The positions of `key_length` keys from slot `first_slot` on, negative at padding.

    With `as_cached`, a cached token is padding if it was when it was cached.
    """

    def resolve() -> Positions:
        of_queries = state.positions()
        if state.offset is None and key_length == state.query_length:
            # In continuous batching, a layer maps the new keys before they are written to their pages.
            return of_queries
        slots = torch.arange(key_length, device=of_queries.ids.device) + first_slot
        if _cache_is_empty(state) and key_length == state.query_length:
            _check_positions(state)
            if state.position_ids is None or _usable_mask(state) is None:
                return of_queries
            return dataclasses.replace(of_queries, ids=of_queries.ids.where(_real_at(state, slots, of_queries.ids), -1))
        spacing = regularity(state)
        ids = _ids_at(state, slots, of_queries.ids, spacing.irregular)
        if spacing.irregular:
            real = _real_at(state, slots, ids)
            if as_cached and state.offset is not None:
                real = real | (slots < state.offset)
            ids = ids.where(real, -1)
        keys = Positions(ids, of_queries.lengths, memo=state.memo)
        counted_back = state.mask_hides_padding and state.position_ids is not None
        if isinstance(first_slot, int) and not spacing.irregular and not counted_back:
            return keys.bounded(first_slot + key_length)
        return keys

    return state.shared(("keys", as_cached), resolve, key_length)


def all_positions_below(state: ForwardState, end: int) -> bool:
    """Whether the positions of all new tokens are below `end`, so that no visible pair is `end` or more apart.

    Computed once for all layers. Always `False` in a compiled or exported graph, which serves all lengths.
    """
    if traced():
        return False

    def look() -> bool:
        if state.positions().ids.is_meta:
            return False
        # Refuses unsupported positions in the first call already, and records the caller's positions on the cache.
        _check_positions(state)
        if state.position_ids is None and isinstance(state.offset, int):
            return state.offset + state.query_length <= end
        # A real position between the two may be that of a query with far keys.
        return state.positions().ids.is_cpu and bool((state.positions().ids <= end - 1).all())

    return state.shared(("all stand before", end), look, everywhere=True)


def slot_distances_are_exact(
    state: ForwardState, first_slot: int | Tensor, key_length: int, mask: Any
) -> bool | Tensor:
    """Whether the distance between each query and each key it sees equals the distance between their slots.

    Args:
        state: the state of the call.
        first_slot: slot of the first key.
        key_length: number of keys.
        mask: the mask passed to the attention function, the only place that shows packed documents.

    Returns:
        A 0-dim boolean tensor in a compiled graph, if the result depends on tensor values; else a bool.
    """
    if (state.position_ids is not None or state.attention_mask is not None) and exporting():
        # A program must be correct for every mask, and its bias is a matrix anyway.
        return False
    if state.position_ids is not None and isinstance(mask, Tensor) and mask.dim() == 4 and _records_nothing(state):
        # The visible pairs show all that is asked, so one flag is read.
        _check_positions(state)
    else:
        even = _is_even(state)
        if even is True or state.position_ids is None:
            return even

    def compare() -> bool | Tensor:
        visible = visible_pairs(mask, state.query_length, key_length)
        if visible is None:
            return _is_even(state)
        even = _has_even_spacing_where(visible, state, first_slot, key_length)
        return even if torch.compiler.is_compiling() else bool(even)

    return state.shared("even", compare, key_length, mask=mask, everywhere=not torch.compiler.is_compiling())


def _records_nothing(state: ForwardState) -> bool:
    """Whether the positions of a call are on a device, and there is no cache on which they would be recorded."""
    starts = _cache_is_empty(state) and state.cache_object is None and state.sequence is None
    return starts and not traced() and not state.positions().ids.is_cpu


def bound_of_unread(state: ForwardState) -> int | None:
    """An upper bound of the positions of a call on a device, if it was not read whether they have gaps.

    They are counted over a mask, or are the numbers of patches.
    """
    if traced() or state.positions().ids.is_cpu:
        return None
    if state.of_grid and state.position_ids is not None:
        return state.positions().bound()
    mask = _usable_mask(state)
    # `generate` reads the mask of a prompt once, so that no step looks up its pairs.
    generates = state.cache_object is not None and GENERATION.get() is not None
    if mask is None or state.position_ids is not None or generates:
        return None
    spacing = regularity(state)
    return mask.shape[1] if spacing.even is None and not spacing.irregular else None


def _check_positions(state: ForwardState) -> None:
    """Refuses unsupported positions, and records those of the caller on the cache."""
    if not _records_nothing(state):
        regularity(state)
    elif state.position_ids is not None:
        state.shared("negative", lambda: refuse_negative(state, state.positions().ids, 0))


def _is_even(state: ForwardState) -> bool | Tensor:
    """Whether all real tokens of a call are as far apart as their slots, read from a device if a caller asks."""
    spacing = regularity(state)
    if spacing.even is None and spacing.irregular:
        query_ids = state.positions().ids
        slots = torch.arange(int(state.offset or 0) + state.query_length, device=query_ids.device)
        ids = _ids_at(state, slots, query_ids, irregular=True)
        spacing.even = bool(_has_even_spacing(ids, _real_at(state, slots, ids)))
    elif spacing.even is None:
        mask, known = _usable_mask(state), recorded(state.cache_object)
        spacing.even = mask is None or bool(_has_even_spacing(counted_tokens(mask)))
        if known is not None:
            known.even = spacing.even
    return spacing.even


def require_window(state: ForwardState) -> None:
    """Refuses a cache that has dropped keys, unless they are those before a window."""
    if not torch.compiler.is_compiling() and state.shared(
        "drops keys", lambda: drops_keys(state.cache_object), everywhere=True
    ):
        raise UnsupportedError(
            f"This {type(state.cache_object).__name__} holds fewer keys than it has seen, and does not report their "
            "positions, which this scheme needs. Give its layers the attribute key_positions, (batch or 1, keys), or "
            "use hf_posenc.SinkCache."
        )


def positions_never_decrease(state: ForwardState, keys: Positions, first_slot: int | Tensor, restarts: bool) -> bool:
    """Whether positions of real tokens never decrease along a row, so that earlier keys have no larger positions.

    Args:
        state: the state of the call.
        keys: the positions of its keys.
        first_slot: slot of the first key.
        restarts: whether positions may restart at 0 because the attention function separates documents there.
    """
    if not regularity(state).irregular:
        return True
    slots = torch.arange(keys.ids.shape[1], device=keys.ids.device) + first_slot
    ids = keys.ids.where(_real_at(state, slots, keys.ids), -_FARTHEST)
    if restarts:
        ids = ids + (ids == 0).cumsum(-1) * 2**40
    earlier = ids.cummax(-1).values
    return bool(((earlier == ids) | (ids < 0)).all())


def _compute_regularity(state: ForwardState) -> Regularity:
    query_ids, offset, mask = state.positions().ids, state.offset, _usable_mask(state)
    differs = None if state.position_ids is None else differs_from_expected(state, query_ids)
    device = query_ids.device
    known = None if _cache_is_empty(state) else state.held or recorded(state.cache_object)
    on_device = not (query_ids.is_cpu or query_ids.is_meta)
    follows = known is not None and known.ids is None and (known.even is not None or on_device)
    if known is not None and follows and differs is None and _goes_on(state):
        assert state.end is not None
        record(state.cache_object, CachedPositions(state.end, mask=mask, even=known.even))
        return Regularity(irregular=False, even=known.even)
    if query_ids.is_meta:
        return Regularity(irregular=False, even=True)
    if state.cache_changed and known is not None and int(offset or 0) > 0:
        raise UnsupportedError(_CHANGED_CACHE)
    doubt = None if known is None else known.unknown
    negative = None if differs is None else negative_positions(state, query_ids)
    if torch.compiler.is_compiling():
        if doubt is not None:
            assert_in_graph(~doubt, _UNKNOWN_POSITIONS)
        if negative is not None:
            assert_in_graph(~negative, NEGATIVE)
        return _compiled(state, query_ids, differs, _holes(mask, device))
    if doubt is not None:
        require(~doubt, _UNKNOWN_POSITIONS, UnsupportedError)
    counted_anew = None if known is None else _counted_anew(known, mask, offset)
    if differs is not None:
        differs = differs | _moved_behind_mask(state, known, query_ids)
    if differs is None and on_device and (known is None or known.ids is None):
        # No position depends on a value, unless the mask shows other cached tokens than before.
        if counted_anew is not None:
            assert_in_graph(~counted_anew, _OTHER_TOKENS)
        _record_regular(state, known, None)
        return Regularity(irregular=False, even=None)
    stated = differs is not None and on_device and known is not None and known.ids is not None
    if stated:
        # Positions of cached tokens are given, and so are those of new ones: it does not matter which were expected.
        refuse_negative(state, query_ids, 0)
    else:
        gaps = _holes(mask, device)
        flags = [flag.to(device) for flag in (negative, differs, counted_anew, gaps) if flag is not None]
        answers = iter(torch.stack(flags).tolist() if flags else ())
        if negative is not None and next(answers):
            raise SequenceLengthError(NEGATIVE)
        stated = differs is not None and next(answers)
        recounted = counted_anew is not None and next(answers)
        if not (stated or recounted) and (known is None or known.ids is None):
            even = gaps is None or not next(answers)
            _record_regular(state, known, even)
            return Regularity(irregular=False, even=even)
    cached = _recorded_length(state, known)
    if not stated and known is not None and not known.by_next_mask and cached and state.held is None:
        farthest = known.at(torch.arange(cached, device=device)).amax(-1)
        if bool((query_ids[:, 0] <= farthest).any()):
            raise UnsupportedError(_NOT_CONTINUED.format(int(farthest.max()), int(query_ids[:, 0].min())))
    slots = torch.arange(cached + state.query_length, device=device)
    ids = _ids_at(state, slots, query_ids, irregular=True)
    real = _real_at(state, slots, ids)
    if state.held is None:
        record(state.cache_object, CachedPositions(len(slots), ids.where(real | (slots < cached), -1)))
    return Regularity(irregular=True, even=bool(_has_even_spacing(ids, real)) if query_ids.is_cpu else None)


def _holes(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else ~_has_even_spacing(counted_tokens(mask.to(device)))


def _record_regular(state: ForwardState, known: CachedPositions | None, even: bool | None) -> None:
    """Records on the cache that positions are counted over the mask or the slots."""
    offset = state.offset
    if state.cache_object is None or offset is None or (known is None and int(offset) != 0):
        return
    # Under a mask that does not show padding, the positions of an accepted cache stay open.
    later = known is not None and known.by_next_mask and state.mask_hides_padding
    mask, length = _usable_mask(state), offset + state.query_length
    record(state.cache_object, CachedPositions(length, mask=mask, by_next_mask=later, even=even))


def _goes_on(state: ForwardState) -> bool:
    """Whether this call continues, in `generate`, a cache that it has filled, so that its mask has new ones at most."""
    generation = None if torch.compiler.is_compiling() else GENERATION.get()
    if generation is None or state.cache_changed or not isinstance(state.offset, int):
        return False
    if id(self_attention_cache(state.cache_object)) not in generation.caches:
        return False
    mask = _usable_mask(state)
    if mask is not None:
        generation.compare((mask[:, state.offset : state.end] == 0).any())
    return True


def _moved_behind_mask(state: ForwardState, known: CachedPositions | None, query_ids: Tensor) -> bool | Tensor:
    """0-dim bool: whether positions differ from the slots under a mask that does not show which tokens are padding.

    Otherwise only the newest positions of such a call are compared, as if cached tokens were directly before them. The
    mask of their call shows whether cached tokens have the positions of their slots.
    """
    offset = state.offset
    if not state.mask_hides_padding or not isinstance(offset, int) or state.held is not None:
        return False
    if offset and (known is None or known.ids is not None or known.by_next_mask or int(known.length) < offset):
        return False
    return (query_ids != torch.arange(offset, offset + state.query_length, device=query_ids.device)).any()


def _counted_anew(known: CachedPositions, mask: Tensor | None, offset: int | Tensor | None) -> Tensor | None:
    """0-dim bool: whether a mask shows other cached tokens than when they were cached; `None` if there is no doubt.

    Cached tokens keep the positions that they had then.
    """
    if known.ids is not None or known.by_next_mask or offset is None:
        return None
    masks = [each.bool() for each in (known.mask, mask) if each is not None]
    if not masks or len({each.shape[0] for each in masks} - {1}) > 1:
        return None
    length, device = min(each.shape[1] for each in masks), masks[-1].device
    changed = masks[0].to(device)[:, :length] != masks[1][:, :length] if len(masks) > 1 else ~masks[0]
    return (changed & (torch.arange(length, device=device) < offset)).any()


def _compiled(state: ForwardState, query_ids: Tensor, differs: Tensor | None, holes: Tensor | None) -> Regularity:
    if differs is None:
        return Regularity(irregular=False, even=True if holes is None else ~holes)
    if _cache_is_empty(state):
        record(state.cache_object, CachedPositions(state.query_length, unknown=differs, mask=_usable_mask(state)))
        slots = torch.arange(state.query_length, device=query_ids.device)
        return Regularity(irregular=True, even=_has_even_spacing(query_ids, _real_at(state, slots, query_ids)))
    assert_in_graph(~differs, _UNKNOWN_POSITIONS)
    return Regularity(irregular=False, even=~differs if holes is None else ~holes)


def _recorded_length(state: ForwardState, known: CachedPositions | None) -> int:
    """The number of cached tokens, after checking that the positions of all of them are known."""
    if state.offset is None:
        raise UnsupportedError(_UNKNOWN_POSITIONS)
    cached = int(state.offset)
    if cached == 0:
        return cached
    by_mask = known is not None and known.ids is None and known.by_next_mask
    if known is None or int(known.length) < cached or (by_mask and state.mask_hides_padding):
        raise UnsupportedError(_UNKNOWN_POSITIONS)
    return cached


_UNKNOWN_POSITIONS = (
    "position_ids of this call or of cached tokens differ from the count over mask or slots and were not recorded. "
    "Pass the whole sequence with use_cache=False, or leave out position_ids or torch.compile when filling the cache."
)
_OTHER_TOKENS = (
    "The mask of this call shows different cached tokens than the mask with which they were cached, so the count over "
    "it gives them other positions. Pass position_ids to every call that continues this cache."
)
_NOT_CONTINUED = (
    "The positions of the cached tokens reach {}, but the first token of this call would stand at {}, which is counted "
    "over the attention mask or the cached tokens. Pass position_ids to every call that continues this cache, also to "
    "`generate`, which counts from 0 otherwise."
)
_CHANGED_CACHE = (
    "The keys in this cache are not those that the model left in it: tokens were dropped, moved, added or overwritten, "
    "so their positions are unknown, and this scheme needs them. Rows may be reordered, selected, repeated and cropped "
    "at the end. After any other change, say which position each cached token has: hf_posenc.accept_cache(cache, "
    "position_ids), and pass position_ids to every later call. Or start with a new cache."
)


def _cache_is_empty(state: ForwardState) -> bool:
    return isinstance(state.offset, int) and state.offset == 0


def _usable_mask(state: ForwardState) -> Tensor | None:
    """The padding mask, if it covers the cached tokens too."""
    mask, offset = state.attention_mask, state.offset
    if mask is not None and isinstance(offset, int) and mask.shape[1] < offset + state.query_length:
        return None
    return mask


def _expected_ids(state: ForwardState, slots: Tensor, query_ids: Tensor) -> Tensor:
    """`(batch or 1, slots)`: the positions implied by the mask or the slots; -1 at padding."""
    mask = _usable_mask(state)
    if mask is not None:
        counted = counted_tokens(mask.to(slots.device))
        return counted.index_select(1, slots.clamp(max=mask.shape[1] - 1)).where(slots < mask.shape[1], -1)
    if state.mask_hides_padding and state.position_ids is not None and state.offset is not None:
        # The mask of a sliding window does not show padding. Positions are counted back from the newest token.
        newest = state.offset + state.query_length - 1
        return (query_ids[:, -1:] - (newest - slots)).clamp(min=-1)
    return slots.unsqueeze(0)


def differs_from_expected(state: ForwardState, query_ids: Tensor) -> Tensor:
    """Whether the caller's `position_ids` differ from those implied by the mask and the slots."""
    slots = torch.arange(state.query_length, device=query_ids.device)
    if state.offset is None:
        return (query_ids != query_ids[:, :1] + slots).any()
    expected = _expected_ids(state, slots + state.offset, query_ids)
    different = expected != query_ids
    if _usable_mask(state) is not None or torch.compiler.is_compiling():
        # The position_ids of known padding do not matter.
        different = different & (expected >= 0)
    return different.any()


def _ids_at(state: ForwardState, slots: Tensor, query_ids: Tensor, irregular: bool) -> Tensor:
    """`(batch or 1, slots)`: the positions of the tokens in these slots."""
    ids = _expected_ids(state, slots, query_ids)
    if not irregular:
        return ids
    known = state.held or recorded(state.cache_object)
    offset = 0 if state.offset is None else state.offset
    cached = known.at(slots) if known is not None and (known.ids is not None or not known.by_next_mask) else None
    rows = {tensor.shape[0] for tensor in (ids, query_ids, cached) if tensor is not None} - {1}
    if len(rows) > 1:
        raise UnsupportedError(
            "The cached tokens were given explicit position_ids, but the number of rows has changed since "
            f"({' and '.join(map(str, sorted(rows)))}), in a way that could not be tracked. Use the cache's own "
            "methods (reorder_cache, batch_select_indices, batch_repeat_interleave), or use_cache=False."
        )
    if cached is not None:
        ids = cached.where(slots < offset, ids)
    new = slots - offset
    placed = query_ids.index_select(1, new.clamp(0, state.query_length - 1))
    return placed.where((new >= 0) & (new < state.query_length), ids)


def _real_at(state: ForwardState, slots: Tensor, ids: Tensor) -> Tensor:
    """`(batch or 1, slots)` bool: tokens that are not known to be padding."""
    return ids >= 0 if _usable_mask(state) is None else _expected_ids(state, slots, ids) >= 0


def _has_even_spacing(ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Whether the real tokens of every row are as far apart as their slots; by default, those with `ids >= 0`."""
    least, most = shifts(ids, ids >= 0 if real is None else real)
    return (most <= least).all()


def shifts(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """`(batch,)` each: by how much the positions of real tokens are at least, and at most, more than their slots."""
    shift = ids - torch.arange(ids.shape[1], device=ids.device)
    return shift.where(real, _FARTHEST).amin(-1), shift.where(real, -_FARTHEST).amax(-1)


def _has_even_spacing_where(visible: Tensor, state: ForwardState, first_slot: int | Tensor, key_length: int) -> Tensor:
    query_ids, offset = state.positions().ids, state.offset
    assert offset is not None
    key_slots = torch.arange(key_length, device=query_ids.device) + first_slot
    irregular = _records_nothing(state) or regularity(state).irregular
    of_keys = _ids_at(state, key_slots, query_ids, irregular) - key_slots
    query_slots = torch.arange(state.query_length, device=query_ids.device) + offset
    of_queries, real = query_ids - query_slots, _real_at(state, query_slots, query_ids)
    rows = state.query_length
    if not torch.compiler.is_compiling():
        rows = max(1, _PAIRS // (max(visible.shape[0], query_ids.shape[0]) * key_length))
    even = torch.ones((), dtype=torch.bool, device=query_ids.device)
    for start in range(0, state.query_length, rows):
        some = slice(start, start + rows)
        moved = of_keys.unsqueeze(-2) != of_queries[:, some].unsqueeze(-1)
        moved = moved & real[:, some].unsqueeze(-1)
        seen = visible[:, :, some] if visible.shape[2] > 1 else visible
        even = even & ~(moved.unsqueeze(1) & seen).any()
    return even
