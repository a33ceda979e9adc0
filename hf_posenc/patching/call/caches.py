"""Finding transformers' cache among the arguments of a call, and its length."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils
from transformers.generation.continuous_batching import PagedAttentionCache

from hf_posenc.patching.anatomy.forward_code import unknown_seam
from hf_posenc.patching.call.cache_notes import note_of, set_note
from hf_posenc.schemes.positions import traced

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
