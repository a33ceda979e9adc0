"""Finding transformers' cache among the arguments of a call, and its length."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import cache_utils

from hf_posenc.patching.find.forward_code import parameter_names

#: Arguments of a stack that may hold its cache.
_STACK_ARGUMENTS = ("past_key_values", "past_key_value", "mems", "cache", "cache_params")
#: Arguments of an attention module that may hold the cache of its keys.
_LAYER_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
#: Base class of the layers of a quantised cache.
QUANTISED_LAYER = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def cache_among(arguments: dict[str, Any]) -> Any:
    """Returns the cache among the arguments of a stack, or `None`."""
    return next((arguments[name] for name in _STACK_ARGUMENTS if arguments.get(name) is not None), None)


def cache_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that this layer updates, or `None`. For an encoder-decoder cache, its self-attention cache."""
    given = next((kwargs[name] for name in _LAYER_ARGUMENTS if kwargs.get(name) is not None), None)
    if given is None and len(args) > 1:
        positional = dict(zip(parameter_names(type(module).forward), args, strict=False))
        given = next((positional[name] for name in _LAYER_ARGUMENTS if positional.get(name) is not None), None)
    own = self_attention_cache(given)
    return own if hasattr(own, "update") else None


def self_attention_cache(cache: Any) -> Any:
    """The self-attention cache of an encoder-decoder cache, which receives all its row operations."""
    return getattr(cache, "self_attention_cache", cache)


def cached_length(cache: Any) -> int | Tensor | None:
    """Number of slots filled before this call; `None` if the cache does not provide it."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        # A static layer returns a tensor that it increments in place before its attention runs.
        return length.clone() if isinstance(length, Tensor) else length
    if isinstance(cache, list | tuple) and cache and isinstance(cache[0], Tensor):
        return int(cache[0].shape[0])
    return None
