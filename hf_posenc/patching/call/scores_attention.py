"""Attention modules that compute their scores themselves."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.scores import Factor, ScoresMode, in_parts
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import AttentionSite, CacheUpdateHook, LayerCall
from hf_posenc.patching.call.cache import cache_of_call, first_cache
from hf_posenc.patching.call.cache_checks import refuse_unknown_tokens
from hf_posenc.patching.call.interface_attention import Rebound, RotaryReplacement
from hf_posenc.patching.call.outside_stack import is_outside
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.forwards import functions_called, unknown_seam, view_of

if TYPE_CHECKING:
    from hf_posenc.patching.place.encoding import LayerEncoding


class ScoresAttention(Rebound, AttentionSite):
    """An attention module outside the attention interface; see `hf_posenc.attention.scores`.

    If the module calls a rotary function, queries and keys are mapped there, before the cache. Otherwise keys are
    mapped when the cache is updated, and queries when they are multiplied with the keys.
    """

    #: These modules reshape cached keys to their original width.
    caches_wide_keys = False

    def __init__(
        self, module: nn.Module, runtime: StackRuntime, encoding: LayerEncoding, bias_arguments: tuple[str, ...]
    ) -> None:
        super().__init__(module, runtime, encoding)
        self.bias_arguments = bias_arguments
        #: Parameters of the module that are zero for its forward: tables of relative biases that it looks up itself.
        self.zero_tables: list[str] = []

    def _rebind_forward(self) -> None:
        rotary = functions_called(inspect.unwrap(self._decorated))
        replaced = {name: RotaryReplacement(function, self) for name, function in rotary.items()}
        self._forward = self._with_globals(replaced) if replaced else self._decorated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward under a `ScoresMode`."""
        self.awaited = False
        if self.encoding.parts and is_outside(self.runtime):
            return self.outside_stack(args, kwargs)
        hidden_states: Any = args[0] if args else next(iter(kwargs.values()))
        axes = hidden_states.dim() if isinstance(hidden_states, Tensor) else 0
        if self.is_other_code and not self.runtime.layout.has_axes and axes not in (2, 3):
            given = type(hidden_states).__name__ + (f" of {axes} axes" if axes else "")
            raise UnsupportedError(
                f"{type(self.module).__name__} gets a {given} as its first argument, and not the hidden states (batch, "
                "length, hidden) of its tokens, so their positions are unknown. Compute attention in a module that "
                "gets them, and give modules inside it names without 'Attention'."
            )
        call = self.begin_call(hidden_states)
        if call.state.held_by_layer:
            call.state = call.state.of_layer(self.module)
        if call.state.cache_object is None:
            call.state.cache_object = first_cache((*args, *kwargs.values()))
        if self.bias_arguments:
            names = inspect.unwrap(self._decorated).__code__.co_varnames[1 : 1 + len(args)]
            args = tuple(self._silenced(name, value) for name, value in zip(names, args, strict=True))
            kwargs = {name: self._silenced(name, value) for name, value in kwargs.items()}
        seen: list[tuple[Tensor, Tensor]] = []

        adds_bias = self.encoding.logit_bias is not None and not self.encoding.only_rotates_by_input

        def pair_map(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            encoding = self.encoding
            changes = not call.rotations or encoding.rotates_by_input or encoding.logit_scale is not None
            # Queries of merged rows may have been rotated before.
            reads_tokens = changes or adds_bias or query.shape[-2] <= call.state.query_length
            if self.is_other_code and reads_tokens and not self.runtime.layout.has_axes:
                refuse_unknown_tokens(call.state, query.shape[-2], key.shape[-2], self.module)
            if not changes and not adds_bias:
                return query, key
            # The module may merge batch and heads.
            some_heads = query.shape[:-2].numel() % encoding.num_heads > 0
            some_queries = query.shape[-2] < key.shape[-2] == call.hidden_states.shape[1]
            if some_heads or (some_queries and not self.runtime.layout.has_axes):
                raise in_parts(type(self.module).__name__)
            if self.runtime.layout.has_axes:
                self.refuse_pooled_keys(query.shape[-2], key.shape[-2])
            whole = query.reshape(-1, encoding.num_heads, *query.shape[-2:])
            heads = whole, key.reshape(whole.shape[0], -1, *key.shape[-2:])
            self.check_head_count(heads[0])
            self.check_rotated(call, heads[0])
            heads = self.map_before_kernel(call, *heads, (mode.query_factor, mode.key_factor))
            seen[:] = [heads]
            if encoding.rotates_by_input:
                heads = self.rotated_by_input(call, *heads)
            if not changes:
                return query, key
            scaled = heads[0] if encoding.logit_scale is None else self.scaled(call.state, heads[0])
            return scaled.reshape(*query.shape[:-1], -1), heads[1].reshape(*key.shape[:-1], -1)

        def bias(scaling: Factor, query_factor: Factor, key_factor: Factor) -> Tensor:
            factors = scaling, query_factor, key_factor
            rotated = self.encoding.rotates_by_input
            return self.bias(call, *seen[0], factors, rotated=rotated).rows()

        def zeros(name: str) -> property:
            return property(lambda view: torch.zeros_like(view._parameters[name]))

        subject = self.module
        if self.zero_tables:
            subject = view_of(subject, {name: zeros(name) for name in self.zero_tables})
        mode = ScoresMode(
            type(self.module).__name__,
            self.encoding.head_dim,
            pair_map if self.encoding.parts else None,
            bias if adds_bias else None,
        )
        call.mode = mode
        cache = cache_of_call(args, kwargs, call.state.cache_object) if self.intercepts_cache_update else None
        calls = self.calls.of_this_thread()
        depth = len(calls)
        try:
            calls.append(call)
            with CacheUpdateHook(cache, self.update_cache, call), self.without_compiling(), mode:
                output = self._forward(subject, *args, **kwargs)
        finally:
            del calls[depth:]
        if mode.score_shape is None or (mode.bias is not None and not mode.biased):
            raise unknown_seam(
                f"{type(self.module).__name__} never multiplied queries of width {self.encoding.head_dim} with keys"
                f"{' and took a softmax over them' if mode.bias else ''}, so the position encoding had no effect.",
                self.module,
            )
        self.note_rotation(call)
        return output

    def without_compiling(self) -> Any:
        """Context manager in which functions that other code compiles run uncompiled, as the mode needs."""
        apart = self.is_other_code and not torch.compiler.is_compiling()
        return torch.compiler.set_stance("force_eager") if apart else nullcontext()

    def _silenced(self, name: str, value: Any) -> Any:
        silenced = name in self.bias_arguments and isinstance(value, Tensor)
        # One number, which fits any scores: some models build a bias for their native length.
        return value.new_zeros((1,) * value.dim()) if silenced else value

    def update_cache(self, call: LayerCall, *args: Any, **kwargs: Any) -> Any:
        """As in other layers. The products of the scheme and of the cache are not those of queries and keys."""
        assert call.mode is not None
        with call.mode.paused():
            return super().update_cache(call, *args, **kwargs)

    def rotate_tensors(self, call: LayerCall, first: Tensor, second: Tensor | None, time_axis: int) -> Any:
        """As in other layers. The products of the scheme are not those of queries and keys."""
        assert call.mode is not None
        with call.mode.paused():
            return super().rotate_tensors(call, first, second, time_axis)

    def rotate_pair(self, phases: Any, query: Tensor, key: Tensor) -> Any:
        """Stands in for the rotary method of the module. `query`, `key` are `(batch, heads, query_len, head_dim)`."""
        call = self.calls.top
        assert call is not None
        return self.rotate_tensors(call, query, key, 2)
