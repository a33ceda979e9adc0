"""What this package knows about a cache, kept beside the cache and not on it.

Tools walk the attributes of a cache (exporters, converters), and an exported program compares them. The notes therefore
lie in a table. They follow `copy`, `deepcopy` and `pickle`, because the reducer of the cache's class takes them along.

A compiled graph cannot read the table. It uses an attribute of the cache, which counts until the next note outside of a
graph.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.positions import KeptValues, exporting

_KEPT = "_hf_posenc_kept"
#: By the identity of the cache, because a class of caches may define equality.
_table: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


def note_of(cache: Any, name: str) -> Any:
    """A note about a cache, or `None`."""
    of_graph = getattr(cache, name, None)
    if of_graph is not None or torch.compiler.is_compiling():
        return of_graph
    found = _table.get(id(cache))
    return None if found is None else found[1].get(name)


def set_note(cache: Any, name: str, value: Any) -> None:
    """Sets a note, unless the type of the cache has no attributes, as a list. An exported program keeps none.

    Args:
        cache: the cache.
        name: the name of the attribute in a graph.
        value: anything that can be copied and pickled, and does not refer to the cache.
    """
    if getattr(cache, "__dict__", None) is None or exporting():
        return
    if torch.compiler.is_compiling():
        setattr(cache, name, value)
        return
    vars(cache).pop(name, None)
    _notes(cache)[name] = value


def kept_values(cache: Any) -> KeptValues:
    """The values that decoding steps with this cache reuse: they follow from weights, or are biases of distances."""
    kept: KeptValues | None = note_of(cache, _KEPT)
    if kept is None:
        kept = KeptValues()
        set_note(cache, _KEPT, kept)
    return kept


def caches_with(name: str, value: Any) -> list[Any]:
    """The caches with this very note, unless a graph has set it."""
    found = [reference() for reference, notes in list(_table.values()) if notes.get(name) is value]
    return [cache for cache in found if cache is not None and note_of(cache, name) is value]


def _notes(cache: Any) -> dict[str, Any]:
    found = _table.get(id(cache))
    if found is None:
        found = _keep(cache, _Notes())
    return found[1]


class _Notes(dict[str, Any]):
    """The notes about one cache. A scheme is known by its identity, so a copy of the cache has the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Notes:
        return _Notes(
            (name, value if isinstance(value, SchemeConfig) else copy.deepcopy(value, memo))
            for name, value in self.items()
        )


def _keep(cache: Any, notes: dict[str, Any]) -> tuple[weakref.ref[Any], dict[str, Any]]:
    key, kind = id(cache), type(cache)
    found = _table[key] = weakref.ref(cache, lambda _: _table.pop(key, None)), notes
    reducer = copyreg.dispatch_table.get(kind)
    if not isinstance(reducer, _Reducer):
        copyreg.pickle(kind, _Reducer(reducer))
    return found


class _Reducer:
    """Reduces a cache for `copy` and `pickle`, together with its notes; `inner` is the reducer of its class, if any."""

    def __init__(self, inner: Callable[[Any], Any] | None) -> None:
        self.inner = inner

    def __call__(self, cache: Any) -> Any:
        """What `__reduce_ex__` returns, with another function that makes the cache."""
        reduced = cache.__reduce_ex__(2) if self.inner is None else self.inner(cache)
        found = _table.get(id(cache))
        return (
            reduced if found is None else (functools.partial(_made, reduced[0]), (found[1], *reduced[1]), *reduced[2:])
        )


def _made(make: Callable[..., Any], notes: dict[str, Any], *args: Any) -> Any:
    cache = make(*args)
    _keep(cache, notes)
    return cache
