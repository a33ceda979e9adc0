"""Where the tokens of a cache stand, kept with the cache.

As a rule a mask or the slots say it. Where a caller's `position_ids` said something else, the positions are put on the
cache object, and follow what is done to its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_NAME = "_hf_posenc_positions"
_ROW_METHODS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")


@dataclass
class CachedPositions:
    """What is known of the tokens in a cache.

    Args:
        length: how many slots are known; a 0-dim tensor for static caches. A cache that has been cropped since says
            itself how many are left.
        ids: `(batch or 1, length)` int64 where the tokens stand elsewhere than mask and slots say, else `None`.
        unknown: 0-dim bool, whether the tokens stand elsewhere and nobody knows where. A compiled graph leaves it,
            because it cannot look at their positions.
    """

    length: int | Tensor
    ids: Tensor | None = None
    unknown: Tensor | None = None


def recorded(cache: Any) -> CachedPositions | None:
    """What is known of the tokens in a cache, or `None`."""
    # Not through `__dict__`, where a compiler does not look.
    found: CachedPositions | None = getattr(_keeper(cache), _NAME, None)
    return found


def record(cache: Any, positions: CachedPositions) -> None:
    """Puts what is known of its tokens on a cache, unless it is of a kind that can hold nothing."""
    keeper = _keeper(cache)
    attributes = getattr(keeper, "__dict__", None)
    if attributes is None:
        return
    setattr(keeper, _NAME, positions)
    if positions.ids is None:
        return
    for name in _ROW_METHODS:
        if hasattr(keeper, name) and not isinstance(attributes.get(name), _Following):
            attributes[name] = _Following(keeper, name, getattr(keeper, name))


def _keeper(cache: Any) -> Any:
    """Of an encoder-decoder's two caches that of self-attention, which the pair hands on what changes rows."""
    return getattr(cache, "self_attention_cache", cache)


class _Following:
    """Stands in for a method of a cache that changes its rows, and does the same to the rows of positions.

    An object, and the method a bound one, so that both follow a deep copy of the cache.
    """

    def __init__(self, cache: Any, name: str, method: Callable[..., Any]) -> None:
        self.cache = cache
        self.name = name
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method."""
        result = self.method(*args, **kwargs)
        positions: CachedPositions = self.cache.__dict__[_NAME]
        if positions.ids is not None and positions.ids.shape[0] > 1:
            how = next(iter((*args, *kwargs.values())))
            repeats = self.name == "batch_repeat_interleave"
            ids = positions.ids
            ids = ids.repeat_interleave(how, 0) if repeats else ids.index_select(0, how.to(ids.device))
            self.cache.__dict__[_NAME] = CachedPositions(positions.length, ids)
        return result
