"""Positions of cached tokens, stored on the cache object.

Usually the positions of cached tokens follow from the attention mask or from their slots. If the caller passed other
`position_ids`, they are recorded on the cache and kept up to date when its rows are reordered or cropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_posenc.patching.call.cache_notes import note_of, set_note
from hf_posenc.patching.call.caches import self_attention_cache

_NAME = "_hf_posenc_positions"
#: The attribute of a cache that tells a compiled graph of positions that it cannot read.
_GIVEN = "_hf_posenc_given_positions"
_ROW_METHODS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")
_TRACKED_METHODS = (*_ROW_METHODS, "crop")


@dataclass
class CachedPositions:
    """The recorded positions of the tokens in a cache.

    Args:
        length: number of slots with known positions; a 0-dim tensor for static caches.
        ids: `(batch or 1, length)` int64 positions if they differ from those implied by the mask or the slots, else
            `None`.
        unknown: 0-dim bool tensor, true if positions differ but were not recorded. Set by compiled graphs, which cannot
            inspect position values.
        keys: the cached keys of one layer at the end of the call in which `ids` were recorded. If the cache now holds
            another tensor, it was changed in a way that `ids` did not follow.
    """

    length: int | Tensor
    ids: Tensor | None = None
    unknown: Tensor | None = None
    keys: Tensor | None = None


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
    attributes = getattr(keeper, "__dict__", None)
    if attributes is None:
        return
    set_note(keeper, _NAME, positions)
    if positions.ids is None:
        if has_given_positions(keeper):
            delattr(keeper, _GIVEN)
        return
    setattr(keeper, _GIVEN, True)
    for name in _TRACKED_METHODS:
        if hasattr(keeper, name) and not isinstance(attributes.get(name), _TrackedMethod):
            attributes[name] = _TrackedMethod(keeper, name, getattr(keeper, name))


def remember_keys(cache: Any) -> None:
    """Stores, at the end of a call, the keys that the recorded positions belong to."""
    known = recorded(cache)
    if known is not None and known.ids is not None:
        known.keys = _plain_keys(cache)


def matches_keys(cache: Any) -> bool:
    """Whether the cache still holds the keys whose positions were recorded; true if none were recorded."""
    known = recorded(cache)
    return known is None or known.keys is None or known.keys is _plain_keys(cache)


def _plain_keys(cache: Any) -> Tensor | None:
    """The keys of the first layer that stores them in one tensor, which every change replaces by a new one."""
    keeper = self_attention_cache(cache)
    if getattr(keeper, "offloading", False):
        return None
    plain = (layer for layer in getattr(keeper, "layers", ()) if type(layer) is DynamicLayer)
    keys = getattr(next(plain, None), "keys", None)
    return keys if isinstance(keys, Tensor) else None


class _TrackedMethod:
    """Replaces a cache method that changes the cached tokens, and applies the same change to their positions.

    An object that holds a bound method, because `copy.deepcopy` of the cache copies both along with it.
    """

    def __init__(self, cache: Any, name: str, method: Callable[..., Any]) -> None:
        self.cache = cache
        self.name = name
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method."""
        known = recorded(self.cache)
        followed = matches_keys(self.cache)
        result = self.method(*args, **kwargs)
        if followed and known is not None and known.ids is not None:
            argument = next(iter((*args, *kwargs.values())))
            ids = self._changed(known.ids, argument)
            length = ids.shape[1] if self.name == "crop" else known.length
            record(self.cache, CachedPositions(length, ids, keys=_plain_keys(self.cache)))
        return result

    def _changed(self, ids: Tensor, argument: Any) -> Tensor:
        if self.name == "crop":
            return ids[:, : int(self.cache.get_seq_length())]
        if ids.shape[0] == 1:
            return ids
        if self.name == "batch_repeat_interleave":
            return ids.repeat_interleave(argument, 0)
        return ids.index_select(0, argument.to(ids.device))
