"""Attention modules that go through transformers' attention interface.

The module's own code object runs with a copy of its globals in which two names are exchanged: the attention interface,
whose chosen function is wrapped, and the rotary function, which is replaced or skipped. The copy belongs to the one
instance, so nothing outside it changes, and `set_attn_implementation` keeps working because the back-end is still
looked up at every call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_posenc.attention.backends import attend_with_bias
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.attention_site import AttentionSite
from hf_posenc.patching.layer_call import LayerCall, LayerEncoding
from hf_posenc.patching.per_thread import PerThread
from hf_posenc.patching.rebinding import rebind, rotary_names
from hf_posenc.patching.rotary_calls import rotary_call
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.watched_cache import KeysOnTheirWay, cache_of_call

INTERFACE = "ALL_ATTENTION_FUNCTIONS"


class InterfaceAttention(AttentionSite):
    """An attention module that uses `ALL_ATTENTION_FUNCTIONS`.

    Args:
        module: the attention module.
        runtime: of its stack.
        encoding: the scheme's parts here.
        drop_native_bias: whether a `position_bias` that the model computes itself is left out.
    """

    def __init__(
        self, module: nn.Module, runtime: StackRuntime, encoding: LayerEncoding, *, drop_native_bias: bool
    ) -> None:
        super().__init__(module, runtime, encoding)
        self.drop_native_bias = drop_native_bias
        self.calls: PerThread[LayerCall] = PerThread()
        self._function: types.FunctionType | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_function": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward under its exchanged globals."""
        if self._function is None:
            self._function = self._rebind(type(self.module).forward)
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        call = self.begin_call(hidden_states)
        cache = cache_of_call(self.module, args, kwargs) if self.watches_keys else None
        self.calls.push(call)
        try:
            with KeysOnTheirWay(cache, functools.partial(self.update_cache, call)):
                output = self._function(self.module, *args, **kwargs)
        finally:
            self.calls.pop()
        if not call.attended:
            raise UnsupportedError(
                f"{type(self.module).__name__} computed its attention without the attention interface (for example "
                "through reorder_and_upcast_attn), so the position encoding had no effect. Switch that path off."
            )
        return output

    def _rebind(self, forward: Any) -> types.FunctionType:
        function = inspect.unwrap(forward)
        replaced: dict[str, Any] = {INTERFACE: _Interface(function.__globals__[INTERFACE], self)}
        for name in rotary_names(function):
            replaced[name] = _Rotary(function.__globals__[name], self)
        return rebind(function, replaced)

    @property
    def call(self) -> LayerCall:
        """The call in progress on this thread."""
        call = self.calls.top
        assert call is not None
        return call

    def attend(self, implementation: str | None, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stands in for the attention function."""
        call = self.call
        call.attended = True
        names = ("module", "query", "key", "value", "attention_mask")
        given = dict(zip(names, args, strict=False)) | {name: kwargs.pop(name) for name in names if name in kwargs}
        rest = args[len(names) :]
        self.check_rotated(call, given["query"])
        query, key = self.mapped_late(call, given["query"], given["key"])
        if self.drop_native_bias:
            kwargs.pop("position_bias", None)
        if kwargs.get("scaling") is None and query.shape[-1] != self.encoding.head_dim:
            # The map has widened the heads, and a kernel goes by the width it sees.
            kwargs["scaling"] = self._scaling
        scaled = self.scaled(call.state, query)
        arguments = (given["module"], scaled, key, given["value"], given.get("attention_mask"), *rest)
        if self.encoding.logit_bias is None:
            return function(*arguments, **kwargs)
        scaling = kwargs.get("scaling")
        bias = self.bias(call, query, key, self._scaling if scaling is None else scaling)
        return attend_with_bias(implementation, function, bias, *arguments, **kwargs)

    @property
    def _scaling(self) -> float:
        return self.encoding.head_dim**-0.5


class _Interface:
    """The attention interface as one patched module sees it."""

    def __init__(self, interface: Any, site: InterfaceAttention) -> None:
        self.interface = interface
        self.site = site

    def get_interface(self, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        function = self.interface.get_interface(implementation, default)
        site = self.site

        def attention(*args: Any, **kwargs: Any) -> Any:
            return site.attend(implementation, function, args, kwargs)

        return attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self.interface, name)


class _Rotary:
    """The rotary function as one patched module sees it."""

    def __init__(self, function: Callable[..., Any], site: InterfaceAttention) -> None:
        self.rotary = rotary_call(function)
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.site.rotate(self.site.call, self.rotary, args, kwargs)
