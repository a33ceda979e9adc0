"""Attention modules that go through transformers' attention interface.

The module's own code object runs with a copy of its globals in which two names are exchanged: the attention interface,
whose chosen function is wrapped, and the rotary function, which is replaced or skipped. The copy belongs to the one
instance, so nothing outside it changes, and `set_attn_implementation` keeps working because the back-end is still
looked up at every call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_posenc.attention.backends import attend_with_bias
from hf_posenc.attention.folding import attend_with_wide_values
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.attention_site import AttentionSite
from hf_posenc.patching.layer_call import LayerCall, LayerEncoding
from hf_posenc.patching.per_thread import PerThread
from hf_posenc.patching.rebinding import names_used, rebind, rotary_names
from hf_posenc.patching.rotary_calls import rotary_call
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.watched_cache import KeysOnTheirWay, cache_of_call

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: The argument in which models hand their own relative biases to the attention function.
_POSITION_BIAS = "position_bias"


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
        self.leaves_scores = _leaves_scores(encoding) and _POSITION_BIAS not in names_used(type(module).forward)
        self.calls: PerThread[LayerCall] = PerThread()
        #: How many brief calls have rotated.
        self.rotations = 0
        self._exchange()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_function", "_briefly")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._exchange()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward under its exchanged globals, as few of them as the scheme needs."""
        if self.retired:
            return self.stock(*args, **kwargs)
        if self.leaves_scores and _POSITION_BIAS not in kwargs:
            if self.encoding.query_key_map is None:
                return self._briefly(self.module, *args, **kwargs)
            if self.rotates_in_place and not torch.compiler.is_compiling():
                rotations = self.rotations
                output = self._briefly(self.module, *args, **kwargs)
                self.require_rotation(self.rotations != rotations)
                return output
        call = self.begin_call(args[0] if args else next(iter(kwargs.values())))
        self.note_cache(call.state, args, kwargs)
        calls = self.calls.own()
        depth = len(calls)
        try:
            calls.append(call)
            if self.watches_keys:
                cache = cache_of_call(self.module, args, kwargs)
                with KeysOnTheirWay(cache, functools.partial(self.update_cache, call)):
                    output = self._function(self.module, *args, **kwargs)
            else:
                output = self._function(self.module, *args, **kwargs)
        finally:
            del calls[depth:]
        if not call.attended:
            raise UnsupportedError(
                f"{type(self.module).__name__} computed its attention without the attention interface (for example "
                "through reorder_and_upcast_attn), so the position encoding had no effect. Switch that path off."
            )
        self.note_rotation(call)
        return output

    def _exchange(self) -> None:
        """Makes the module's forward over exchanged globals, before any compiler watches.

        The second one is for schemes that change nothing but the rotation: no more is exchanged, and nothing is noted.
        """
        forward = inspect.unwrap(type(self.module).forward)
        rotary = {name: forward.__globals__[name] for name in rotary_names(forward)}
        replaced: dict[str, Any] = {name: _Rotary(function, self) for name, function in rotary.items()}
        interface = _Interface(forward.__globals__[INTERFACE], self)
        self._function = rebind(forward, replaced | {INTERFACE: interface})
        self._briefly = rebind(forward, {name: _BriefRotary(function, self) for name, function in rotary.items()})

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
        self.check_share(given["query"])
        self.check_rotated(call, given["query"])
        query, key = self.mapped_late(call, given["query"], given["key"])
        if self.drop_native_bias:
            kwargs.pop("position_bias", None)
        if kwargs.get("scaling") is None and query.shape[-1] != self.encoding.head_dim:
            # The map has widened the heads, and a kernel goes by the width it sees.
            kwargs["scaling"] = self._scaling
        scaled = self.scaled(call.state, query)
        arguments = (given["module"], scaled, key, given["value"], given.get("attention_mask"), *rest)
        attend = function
        if self.encoding.logit_bias is not None:
            scaling, mask = kwargs.get("scaling"), given.get("attention_mask")
            # Flash kernels are told where documents begin, for rows of one batch item.
            flash = "flash" in (implementation or "") and mask is None and query.shape[0] == 1
            bias = self.bias(call, query, key, self._scaling if scaling is None else scaling, mask, flash)
            attend = functools.partial(attend_with_bias, implementation, function, bias)
        if self._widens_heads and implementation not in (None, "eager") and query.shape[2] > 1:
            return attend_with_wide_values(attend, *arguments, **kwargs)
        return attend(*arguments, **kwargs)

    @property
    def _widens_heads(self) -> bool:
        query_key_map = self.encoding.query_key_map
        return query_key_map is not None and query_key_map.width_factor != 1

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


class _BriefRotary(_Rotary):
    """The same, for calls of which nothing is noted."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, second, time_axis = self.rotary.tensors(args, kwargs)
        site = self.site
        if site.encoding.query_key_map is not None:
            site.rotations += 1
            first, second = site.turned(site.state_for(first.shape[time_axis]), first, second, time_axis)
        return first if second is None else (first, second)


def _leaves_scores(encoding: LayerEncoding) -> bool:
    """Whether the attention function gets what the module hands it, once the rotary function has been replaced."""
    if encoding.logit_bias is not None or encoding.logit_scale is not None:
        return False
    query_key_map = encoding.query_key_map
    return query_key_map is None or (query_key_map.width_factor == 1 and not query_key_map.mapped_again)
