"""A cache's `update` while one patched layer runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from hf_posenc.patching.runtime import parameter_names

_CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")


class KeysOnTheirWay:
    """Context manager: keys pass `on_update` on their way into the cache and out again.

    Args:
        cache: the cache of this layer's keys, or `None`.
        on_update: `(update, key_states, value_states, args, kwargs) -> (keys, values)`.
    """

    def __init__(self, cache: Any, on_update: Callable[..., Any]) -> None:
        self.cache = cache
        self.on_update = on_update
        self.own_update: Any = None

    def __enter__(self) -> None:
        if self.cache is None:
            return
        # Another wrapper may sit on the instance already.
        self.own_update = vars(self.cache).get("update")
        self.cache.update = _Update(self.cache.update, self.on_update)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cache is None:
            return
        if self.own_update is not None:
            self.cache.update = self.own_update
        else:
            del self.cache.update


class _Update:
    def __init__(self, update: Callable[..., Any], on_update: Callable[..., Any]) -> None:
        self.update = update
        self.on_update = on_update

    def __call__(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.on_update(self.update, key_states, value_states, args, kwargs)


def cache_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache this layer's keys go into, or `None`; of an encoder-decoder's two, that of self-attention."""
    given = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
    if given is None and len(args) > 1:
        positional = dict(zip(parameter_names(type(module).forward), args, strict=False))
        given = next((positional[name] for name in _CACHE_NAMES if positional.get(name) is not None), None)
    own = getattr(given, "self_attention_cache", given)
    return own if hasattr(own, "update") else None
