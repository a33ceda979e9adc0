"""The cache of a call: which argument it is, how long it is, and what is known about it.

What this package knows about a cache is kept beside the cache and not on it. Tools walk the attributes of a cache
(exporters, converters), and an exported program compares them. The notes therefore lie in a table. They follow `copy`,
`deepcopy` and `pickle`, because the reducer of the cache's class takes them along. A compiled graph cannot read the
table. It uses an attribute of the cache, which counts until the next note outside of a graph.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.generation.continuous_batching import PagedAttentionCache

from hf_posenc.patching.anatomy.forward_code import unknown_seam
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.positions import KeptValues, exporting, traced

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


#: Argument of XLNet's stack: a list of tensors, which nothing else tells apart from other lists.
_MEMORY = "mems"
_LENGTH = "_hf_posenc_length"
#: Types of most arguments, which are told apart faster than by what they can do.
_NO_CACHES = (Tensor, type(None), bool, int, float, str, tuple)
#: Base class of the layers of a quantised cache.
QUANTISED_LAYER = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def cache_among(arguments: dict[str, Any]) -> Any:
    """Returns the cache among the arguments of a stack, or `None`."""
    found = first_cache(arguments.values())
    return arguments.get(_MEMORY) if found is None else found


def cache_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that a layer updates, or `None`. For an encoder-decoder cache, its self-attention cache."""
    return self_attention_cache(first_cache((*args, *kwargs.values())))


def cache_argument(model: nn.Module) -> str:
    """The name of the argument in which a model takes its cache: the one that is annotated as a cache.

    Raises:
        UnsupportedError: if there is none.
    """
    parameters = inspect.signature(type(model).forward).parameters.values()
    found = next((one.name for one in parameters if "Cache" in str(one.annotation)), None)
    if found is None:
        raise unknown_seam(f"The forward of {type(model).__name__} has no argument that is annotated as a cache.")
    return found


def first_cache(values: Iterable[Any]) -> Any:
    """The first value that is a cache, or `None`. Its argument has another name in each architecture and version."""
    return next((value for value in values if not isinstance(value, _NO_CACHES) and is_cache(value)), None)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache, by what it can do."""
    # A cache of continuous batching has no length, because every request has its own.
    counts = hasattr(value, "update") and hasattr(value, "get_seq_length")
    return counts or isinstance(value, PagedAttentionCache)


def self_attention_cache(cache: Any) -> Any:
    """The self-attention cache of an encoder-decoder cache, which receives all its row operations."""
    return getattr(cache, "self_attention_cache", cache)


def _of_static_layer(cache: Any, length: Tensor) -> int | Tensor:
    """The length in a tensor, which a static layer increments in place before its attention runs.

    Outside of graphs it is read from the device once. Later calls count on until somebody else has written to it.
    """
    if traced() or length.is_meta or length.is_inference():
        return length.clone()
    counted = note_of(self_attention_cache(cache), _LENGTH)
    return counted[1] if counted and counted[0] == _state(length) else int(length)


def remember_length(cache: Any, length: int | None) -> None:
    """Stores, at the end of a call, the length of a cache whose layers keep it in a tensor. A graph cannot tell it."""
    keeper = self_attention_cache(cache)
    kept = keeper.get_seq_length() if hasattr(keeper, "get_seq_length") else None
    if isinstance(kept, Tensor):
        readable = not traced() and not kept.is_inference() and length is not None
        set_note(keeper, _LENGTH, (_state(kept), length) if readable else False)


def _state(length: Tensor) -> tuple[int, int]:
    return length.data_ptr(), length._version


def cached_length(cache: Any) -> int | Tensor | None:
    """Number of slots filled before this call; `None` if the cache does not provide it."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        return _of_static_layer(cache, length) if isinstance(length, Tensor) else length
    if isinstance(cache, list | tuple) and cache and isinstance(cache[0], Tensor):
        return int(cache[0].shape[0])
    return None
