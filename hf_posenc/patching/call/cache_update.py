"""Intercepting a cache's `update` while one patched layer runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from hf_posenc.patching.call.layer_call import LayerCall

#: In older versions, compiled code deletes the attribute although it has never set it.
_CANNOT_DELETE = torch.__version__ < "2.13"


class CacheUpdateHook:
    """Context manager that replaces the `update` method of a cache by a function.

    Args:
        cache: the cache of this layer's keys, or `None`.
        on_update: `(call, update, key_states, value_states, *args, **kwargs) -> (keys, values)`.
        call: the first argument of the function.
    """

    def __init__(self, cache: Any, on_update: Callable[..., Any], call: LayerCall) -> None:
        self.cache = cache
        self.on_update = on_update
        self.call = call

    def __enter__(self) -> None:
        if self.cache is None:
            return
        # The instance may already carry another wrapper.
        self.own_update = vars(self.cache).get("update")
        self.update = self.cache.update
        self.cache.update = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cache is None:
            return
        if self.own_update is not None:
            self.cache.update = self.own_update
        elif _CANNOT_DELETE and torch.compiler.is_compiling():
            self.cache.update = self.update
        else:
            del self.cache.update

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `on_update` in place of the cache's `update`."""
        return self.on_update(self.call, self.update, *args, **kwargs)
