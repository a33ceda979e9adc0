"""Attention modules that compute their scores themselves."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.scores import ScoresMode
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.attention_site import AttentionSite, LayerCall, LayerEncoding
from hf_posenc.patching.per_thread import PerThread
from hf_posenc.patching.rebinding import rebind, rotary_names
from hf_posenc.patching.rotary_calls import rotary_call
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.state import ForwardState


class ScoresAttention(AttentionSite):
    """An attention module outside the attention interface; see `hf_posenc.attention.scores`.

    Where the module calls a rotary function of its own, queries and keys are mapped there, before the cache. Elsewhere
    the mapped keys are those of all slots, after the cache, so positions are slot numbers: enough for every map that
    depends on distance.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: StackRuntime,
        encoding: LayerEncoding,
        bias_arguments: tuple[str, ...] = (),
    ) -> None:
        super().__init__(module, runtime, encoding)
        self.bias_arguments = bias_arguments
        self.calls: PerThread[LayerCall] = PerThread()

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward under a `ScoresMode`, which torch.compile cannot trace and runs as it is."""
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        time_axis = 0 if self.runtime.time_major else 1
        state = self.current_state(hidden_states.shape[time_axis])
        forward = inspect.unwrap(type(self.module).forward)
        args, kwargs = self._without_native_bias(forward, args, kwargs)
        call = LayerCall(state)

        def pair_map(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return (query, key) if call.rotations else self._map_slots(state, query, key)

        def bias(query_length: int, key_length: int) -> Tensor:
            return self.bias(state, query_length, key_length, hidden_states.device)

        mode = ScoresMode(
            self.encoding.head_dim,
            pair_map if self.encoding.query_key_map is not None else None,
            bias if self.encoding.logit_bias is not None else None,
        )
        function = self._rebind(forward, call)
        self.calls.push(call)
        try:
            with mode:
                output = function(self.module, *args, **kwargs)
        finally:
            self.calls.pop()
        if mode.score_shape is None or (mode.bias is not None and not mode.biased):
            raise UnsupportedError(
                f"{type(self.module).__name__} never multiplied queries of width {self.encoding.head_dim} with keys"
                f"{' and took a softmax over them' if mode.bias else ''}, so the position encoding had no effect. "
                "Declare the architecture with hf_posenc.register_architecture."
            )
        return output

    def _without_native_bias(
        self, forward: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.bias_arguments:
            return args, kwargs
        names = forward.__code__.co_varnames[1 : 1 + len(args)]
        args = tuple(self._silenced(name, value) for name, value in zip(names, args, strict=True))
        return args, {name: self._silenced(name, value) for name, value in kwargs.items()}

    def _silenced(self, name: str, value: Any) -> Any:
        return torch.zeros_like(value) if name in self.bias_arguments and isinstance(value, Tensor) else value

    def _map_slots(self, state: ForwardState, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None
        query_length, key_length = query.shape[-2], key.shape[-2]
        query_start, key_start = self.key_start(state, query_length, key_length)
        query_phases = self.slot_phases(state, query_start, query_length, query.device)
        key_phases = self.slot_phases(state, key_start, key_length, key.device)
        return (
            _over_leading_axes(query_key_map.map_query, query, query_phases),
            _over_leading_axes(query_key_map.map_key, key, key_phases),
        )

    def _rebind(self, forward: types.FunctionType, call: LayerCall) -> types.FunctionType:
        names = rotary_names(forward)
        if not names:
            return forward
        return rebind(forward, {name: self._rotary(forward.__globals__[name], call) for name in names})

    def _rotary(self, function: Any, call: LayerCall) -> Any:
        rotary = rotary_call(function)

        def rotate(*args: Any, **kwargs: Any) -> Any:
            return self.rotate(call, rotary, args, kwargs)

        return rotate

    def rotate_pair(self, query: Tensor, key: Tensor) -> Any:
        """Maps a query and a key `(batch, heads, query_len, head_dim)` that the module hands to its rotary method."""
        call = self.calls.top
        assert call is not None
        return self.rotate_tensors(call, query, key, 2)


def _over_leading_axes(map_one: Any, tensor: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
    """Applies a map to `(..., length, head_dim)` whatever stands before."""
    flat = tensor.reshape(1, -1, *tensor.shape[-2:])
    return map_one(flat, phases).reshape(tensor.shape)
