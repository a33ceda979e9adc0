"""The scheme with which the tokens of a cache were encoded, a note about the cache.

Keys of another scheme usually have the same shape, so nothing else shows that they do not suit. A cache with tokens but
without a scheme was filled before the model was patched, or was put together by someone else.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache_notes import cached_length, caches_with, note_of, self_attention_cache, set_note
from hf_posenc.patching.call.cached_positions import CachedPositions, record, remember_keys
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.positions import traced

#: The name of the note.
SCHEME = "_hf_posenc_scheme"
#: Takes the place of the scheme of an accepted cache, which any patched model may continue.
_ACCEPTED = "accepted"


def accept_cache(cache: Any, position_ids: Tensor | None = None) -> None:
    """States that the keys in a cache suit the scheme of the patched model that continues it, and their positions.

    A patched model refuses a cache with tokens that it did not encode: one that was filled before the patch, put
    together from stored tensors, or merged from others. It also refuses a cache from which tokens were dropped or in
    which they were moved, if its scheme needs their positions. If the keys were computed with this scheme, this
    function makes the cache usable.

    Args:
        cache: the cache, in its present state.
        position_ids: `(batch or 1, length)`, the position of each cached token; `None` if they are 0, 1, 2, ... (or
            counted over the attention mask). Calls that continue the cache must then pass `position_ids` too.

    Raises:
        ValueError: if the cache holds another number of tokens.
        TypeError: if the positions are not a tensor of integers.
        UnsupportedError: for a cache without a length, or whose type does not allow attributes.
    """
    keeper = self_attention_cache(cache)
    length = cached_length(keeper)
    if length is None or getattr(keeper, "__dict__", None) is None:
        raise UnsupportedError(
            f"A {type(cache).__name__} does not state its length, or cannot keep a remark about its keys. Use one of "
            "transformers' cache classes."
        )
    if position_ids is not None and (not isinstance(position_ids, Tensor) or position_ids.is_floating_point()):
        raise TypeError("position_ids must be a tensor of integers: (batch or 1, length).")
    if position_ids is not None and position_ids.shape[-1:] != (int(length),):
        raise ValueError(
            f"position_ids have the shape {tuple(position_ids.shape)}, but the cache holds {int(length)} tokens. Give "
            "one position for each of them: (batch or 1, length)."
        )
    ids = None if position_ids is None else position_ids.long().view(-1, int(length))
    record(keeper, CachedPositions(length, ids, by_next_mask=ids is None))
    remember_keys(keeper)
    set_note(keeper, SCHEME, _ACCEPTED)


def check_cached_scheme(cache: Any, scheme: SchemeConfig) -> None:
    """Refuses a cache whose tokens were encoded with another scheme, or by no patched model.

    Raises:
        UnsupportedError: if the cache holds such tokens.
    """
    if traced():
        return
    keeper = self_attention_cache(cache)
    known = note_of(keeper, SCHEME)
    if known is scheme or getattr(keeper, "__dict__", None) is None:
        return
    if known == scheme or known is _ACCEPTED:
        guard = vars(keeper).get("update")
        if isinstance(guard, _RefusedInStock):
            guard.lift()
        return
    # A static cache is emptied and used again. Its length is read only here, because that waits for a GPU.
    length = cached_length(keeper)
    if length is None or int(length) == 0:
        return
    if known is None:
        raise UnsupportedError(
            f"The cache holds {int(length)} tokens that were not encoded with {scheme.name!r} by a patched model: it "
            "was filled before the model was patched, or put together from tensors. Start with a new cache. If its "
            "keys were computed with this scheme, call hf_posenc.accept_cache(cache, position_ids) first."
        )
    raise UnsupportedError(
        f"The cache holds {int(length)} tokens that were encoded with {known.name!r}, and this model now has "
        f"{scheme.name!r}{' with other options' if known.name == scheme.name else ''}. Their keys do not suit it. "
        "Start with a new cache."
    )


def refuse_in_stock(scheme: SchemeConfig) -> None:
    """Makes the caches that a scheme has filled refuse tokens of the stock model, once the scheme has been removed."""
    for cache in caches_with(SCHEME, scheme):
        if not isinstance(vars(cache).get("update"), _RefusedInStock):
            cache.update = _RefusedInStock(cache, scheme.name, vars(cache).get("update"))
            # A model that gets the scheme again looks at the cache once more.
            set_note(cache, SCHEME, copy.copy(scheme))


class _RefusedInStock:
    """Stands in for the `update` of a cache whose scheme has been removed from the model."""

    def __init__(self, cache: Any, name: str, inner: Any) -> None:
        self.cache = cache
        self.name = name
        self.inner = inner

    def lift(self) -> None:
        """Gives the cache its own `update` back."""
        if self.inner is None:
            del self.cache.update
        else:
            self.cache.update = self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the cache if it has been emptied.

        Raises:
            UnsupportedError: if it holds tokens.
        """
        length = int(cached_length(self.cache) or 0)
        if length:
            raise UnsupportedError(
                f"The cache holds {length} tokens that were encoded with {self.name!r}, which has been removed from "
                "the model. Their keys do not suit the stock model. Start with a new cache."
            )
        self.lift()
        return self.cache.update(*args, **kwargs)
