"""Positions of cached tokens, stored on the cache object.

Usually the positions of cached tokens follow from the attention mask or from their slots. If the caller passed other
`position_ids`, they are recorded on the cache. Others may reorder, select, repeat or crop the cached rows, by the
cache's methods or by hand. What they did is read from the keys, and the positions follow.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_posenc.patching.call.cache_notes import note_of, self_attention_cache, set_note
from hf_posenc.patching.call.generation_call import GENERATION
from hf_posenc.patching.call.padding import counted_tokens
from hf_posenc.schemes.positions import traced

_NAME = "_hf_posenc_positions"
#: The attribute of a cache that tells a compiled graph of positions that it cannot read.
_GIVEN = "_hf_posenc_given_positions"
#: The attribute of a cache that a compiled graph has continued, whose keys are therefore not those that were seen.
_CONTINUED = "_hf_posenc_continued"
#: Numbers of each key that are compared. Equal keys of different tokens are as unlikely as equal floats.
_COMPARED = 4


@dataclass
class CachedPositions:
    """The recorded positions of the tokens in a cache.

    Args:
        length: number of slots with known positions; a 0-dim tensor for static caches.
        ids: `(batch or 1, length)` int64 positions if they differ from those implied by the mask or the slots, else
            `None`.
        unknown: 0-dim bool tensor, true if positions differ but were not recorded. Set by compiled graphs, which cannot
            inspect position values.
        keys: the cached keys at the end of the last complete call; `None` after a compiled call.
        mask: `(batch, length)`, the padding mask over which the positions were counted, if `ids` is `None`; `None` if
            they follow from the slots.
        by_next_mask: whether they are counted over the mask of the next call instead.
        even: whether all real tokens are as far apart as their slots; `None` if nobody has looked.
    """

    length: int | Tensor
    ids: Tensor | None = None
    unknown: Tensor | None = None
    keys: SeenKeys | None = None
    mask: Tensor | None = None
    by_next_mask: bool = False
    even: bool | None = None

    def counted(self, slots: Tensor) -> Tensor:
        """`(batch or 1, slots)`: the positions implied when the tokens in these slots were cached; -1 at padding."""
        if self.mask is None:
            return slots.unsqueeze(0)
        counted = counted_tokens(self.mask.to(slots.device))
        return counted.index_select(1, slots.clamp(max=counted.shape[1] - 1))


class SeenKeys:
    """The keys of a cache at one moment, from which later changes are told.

    Args:
        keys: of the layers that have keys; at least one. `None` for one that no longer exists.
        length: the cached length of the last layer if it is a number, or `None`.
        window: the window of the last layer, which keeps one key less; 0 if it keeps all.
        last: the keys of the last layer.
        written: of each layer, whether somebody has written to its keys since.
    """

    def __init__(
        self, keys: Sequence[Tensor | None], length: int | None, window: int, last: Tensor, written: Sequence[bool]
    ) -> None:
        # Only one layer is kept in memory until the next call.
        self.last = last
        self.length = length
        self.window = window
        self._each = [
            (_gone if one is None else weakref.ref(one), None if late else _state(one))
            for one, late in zip(keys, written, strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the cache contain copies of its keys, with their own count of writes.
        keys = [reference() for reference, _ in self._each]
        written = [_state(one) != state for one, (_, state) in zip(keys, self._each, strict=True)]
        return SeenKeys, (keys, self.length, self.window, self.last, written)

    def still_in(self, keys: list[Any]) -> bool:
        """Whether these are the same keys, and nobody has written to them."""
        if len(keys) != len(self._each):
            return False
        pairs = zip(keys, self._each, strict=True)
        return all(one is reference() and _state(one) == state for one, (reference, state) in pairs)

    def all_replaced_by(self, keys: list[Tensor]) -> bool:
        """Whether every layer has other keys, as after an operation on the whole cache."""
        if len(keys) != len(self._each):
            return False
        return not any(one is reference() for one, (reference, _) in zip(keys, self._each, strict=True))


def recorded(cache: Any) -> CachedPositions | None:
    """The positions recorded on a cache, or `None`."""
    found: CachedPositions | None = note_of(self_attention_cache(cache), _NAME)
    return found


def has_given_positions(cache: Any) -> bool:
    """Whether positions of cached tokens were recorded that a compiled graph cannot read."""
    return getattr(self_attention_cache(cache), _GIVEN, False)


def record(cache: Any, positions: CachedPositions) -> None:
    """Records positions on a cache, unless its type does not allow attributes."""
    keeper = self_attention_cache(cache)
    if getattr(keeper, "__dict__", None) is None:
        return
    if positions.keys is None and not traced():
        # A call that fails leaves tokens in some layers, which are not those of the last complete call.
        positions.keys = getattr(recorded(keeper), "keys", None)
    set_note(keeper, _NAME, positions)
    if positions.ids is not None:
        setattr(keeper, _GIVEN, True)
    elif has_given_positions(keeper):
        delattr(keeper, _GIVEN)


def remember_keys(cache: Any) -> None:
    """Stores, at the end of a call, the keys that the recorded positions belong to."""
    keeper = self_attention_cache(cache)
    if traced():
        set_note(keeper, _CONTINUED, True)
        return
    known, generation = recorded(keeper), GENERATION.get()
    if known is not None:
        known.keys = _seen(keeper)
    if generation is not None:
        generation.caches.add(id(keeper))
    if note_of(keeper, _CONTINUED):
        delattr(keeper, _CONTINUED)


def matches_keys(cache: Any) -> bool:
    """Whether the positions that were recorded are those of the keys in the cache; true if none were recorded.

    If rows were reordered, selected, repeated or cropped, the recorded positions are changed in the same way.
    """
    keeper = self_attention_cache(cache)
    known = None if traced() or note_of(keeper, _CONTINUED) else recorded(cache)
    if known is None or known.keys is None or known.keys.still_in(_keys(cache)):
        return True
    seen = _seen(cache)
    generation = GENERATION.get()
    if generation is not None and known.ids is None and generation.has_filled(keeper):
        # Beams of one prompt have the same mask, so it does not matter how `generate` has reordered them.
        followed: CachedPositions | None = dataclasses.replace(known, keys=seen, mask=None, by_next_mask=True)
    else:
        followed = _followed(known, known.keys, seen, _keys(cache))
    if followed is not None:
        record(cache, followed)
    return followed is not None


def _followed(
    known: CachedPositions, before: SeenKeys, seen: SeenKeys | None, keys: list[Tensor]
) -> CachedPositions | None:
    """The positions of the keys that are in a cache now, or `None` if they are not rows of those before."""
    if seen is None or not before.all_replaced_by(keys):
        return None
    old, new = before.last, seen.last
    removed = 0 if before.length is None or seen.length is None else before.length - seen.length
    stop = old.shape[-2] - removed if old.dim() == 4 else -1
    # A layer with a window keeps only the last keys.
    start = stop - new.shape[-2]
    if start > 0 and new.shape[-2] + 1 != seen.window:
        return None
    if removed < 0 or start < 0 or new.dim() != 4 or old.shape[1::2] != new.shape[1::2]:
        return None
    few = old[:, 0, start:stop, :_COMPARED].to(new.device)
    same = (new[:, None, 0, :, :_COMPARED] == few).flatten(2).all(-1)
    rows = same.int().argmax(1, keepdim=True)
    if not bool(same.gather(1, rows).all()):
        return None
    length = known.length if seen.length is None else seen.length
    ids = known.ids if known.ids is None or seen.length is None else known.ids[:, : seen.length]
    if ids is not None and ids.shape[0] > 1:
        others, ids = ids, ids.index_select(0, rows.flatten().to(ids.device))
        # Rows with equal keys may have had different positions.
        if bool((same.to(ids.device).unsqueeze(-1) & (ids.unsqueeze(1) != others)).any()):
            return None
    mask = known.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask.index_select(0, rows.flatten().to(mask.device))
    return dataclasses.replace(known, length=length, ids=ids, keys=seen, mask=mask)


def _seen(cache: Any) -> SeenKeys | None:
    keys = _keys(cache)
    if not keys:
        return None
    layers = self_attention_cache(cache).layers
    last = next(layer for layer in reversed(layers) if getattr(layer, "keys", None) is keys[-1])
    length = last.get_seq_length()
    window = getattr(last, "sliding_window", 0) if getattr(last, "is_sliding", False) else 0
    return SeenKeys(keys, length if isinstance(length, int) else None, window, keys[-1], [False] * len(keys))


def _gone() -> None:
    """Takes the place of a reference to keys that no longer exist."""


def _keys(cache: Any) -> list[Tensor]:
    found = [getattr(layer, "keys", None) for layer in getattr(self_attention_cache(cache), "layers", ())]
    return [keys for keys in found if isinstance(keys, Tensor)]


def _state(tensor: Tensor | None) -> tuple[Any, ...]:
    """How often others have written to a tensor, and its shape. Tensors of inference mode do not count."""
    return () if tensor is None else (0 if tensor.is_inference() else tensor._version, tensor.shape)
