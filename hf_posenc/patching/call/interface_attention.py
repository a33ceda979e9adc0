"""Attention modules that go through transformers' attention interface.

The module's own code object runs with a copy of its globals in which two names are replaced: the attention interface,
whose attention functions are wrapped, and the rotary function. The copy belongs to one instance, so other modules are
unaffected. `set_attn_implementation` keeps working because the backend is still looked up in every call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.attention.backends import MatrixAttention, attention_with, is_single_query_of_sdpa
from hf_posenc.attention.block_attention import AttentionCall, single_query_attention
from hf_posenc.attention.folding import attend_with_wide_values
from hf_posenc.attention.forms import FusedForm
from hf_posenc.attention.scores import in_parts
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.rotary_functions import rotary_call
from hf_posenc.patching.call.attention_site import (
    POSITION_BIAS,
    AttentionSite,
    CacheUpdateHook,
    LayerCall,
    with_batch,
    without_batch,
)
from hf_posenc.patching.call.cache import cache_of_call, first_cache
from hf_posenc.patching.call.cache_checks import refuse_unknown_tokens, rotates_cached_keys
from hf_posenc.patching.call.checked_layer import CheckedLayer
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.key_positions import all_positions_below
from hf_posenc.patching.call.outside_stack import is_outside
from hf_posenc.patching.call.paged_requests import EAGER, PAGES, PREFIX, attend_pages, read_pages
from hf_posenc.patching.call.runtime import PerThread, StackRuntime
from hf_posenc.patching.call.split_sequence import attend_split
from hf_posenc.patching.forwards import (
    INTERFACE,
    PlacedForward,
    functions_called,
    in_decorators,
    is_other_code,
    names_used,
    rebind,
    unknown_seam,
)
from hf_posenc.schemes.weights import number_in_graph

if TYPE_CHECKING:
    from hf_posenc.patching.place.encoding import LayerEncoding


class Rebound(PlacedForward):
    """Base class for running the forward of an attention module with other globals, whose interface calls `attend`.

    Copies do not contain the rebound forwards. These are made in advance, so that torch.compile does not trace this.
    """

    #: The attributes that hold the forwards.
    rebound: ClassVar[tuple[str, ...]] = ("_forward",)
    _forward: Callable[..., Any]

    def __init__(self, module: nn.Module, runtime: StackRuntime, encoding: LayerEncoding) -> None:
        super().__init__(module, runtime, encoding)
        self.calls: PerThread[LayerCall] = PerThread()
        self.is_other_code = is_other_code(self._decorated)
        self._rebind_forward()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls this object, whose class changes when the scheme is removed."""
        return self(*args, **kwargs)  # type: ignore[operator]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.rebound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rebind_forward()

    def _rebind_forward(self) -> None:
        self._forward = self._with_globals({INTERFACE: InterfaceReplacement(self)})

    @property
    def _decorated(self) -> Any:
        """The function that is rebound."""
        return type(self.module).forward if self.inner is None else self.inner.__func__

    def _with_globals(self, replaced: dict[str, Any]) -> types.FunctionType:
        return in_decorators(self._decorated, rebind(inspect.unwrap(self._decorated), replaced))

    def factors_before(self, scaling: float | Tensor | None) -> tuple[float, float]:
        """What the module has multiplied its queries and its keys with, if its kernel multiplies by `scaling`."""
        if self.operand_factors is not None:
            return self.operand_factors
        stated = getattr(self.module, "scaling", None)
        if not isinstance(stated, float) or isinstance(scaling, Tensor) or scaling != 1 or stated == 1:
            return 1.0, 1.0
        reads = getattr(self.encoding.logit_bias, "reads_heads", False)
        reads = reads or getattr(self.encoding.query_key_map, "reads_magnitude", False)
        if reads and self.is_other_code:
            raise UnsupportedError(
                f"{type(self.module).__name__} is not a class of transformers, and its attention function is called "
                "with scaling=1. This scheme reads the values of queries and keys, and it is not known what they were "
                "multiplied with before. Pass the factor as scaling, or declare it with hf_posenc.register_architecture"
                f"({self.module.config.model_type!r}, architecture=Architecture(operand_factors=...))."
            )
        # Whisper and OPT multiply queries with their own factor, and ask for logits without one.
        return stated, 1.0

    @property
    def default_scaling(self) -> float:
        """The factor of `query . key` in a kernel that is given none."""
        return self.encoding.head_dim**-0.5


class InterfaceAttention(Rebound, AttentionSite):
    """An attention module that uses `ALL_ATTENTION_FUNCTIONS`.

    Args:
        module: the attention module.
        runtime: the runtime of its stack.
        encoding: the scheme's parts at this layer.
        operand_factors: of `Architecture`.
        native_bias: what happens to a bias that the model passes to the attention function: it is "dropped" if the
            scheme replaces it, "kept" if it is about something else, and refused if it is "unknown".
    """

    rebound = ("_forward", "_rotary_only_forward")
    knows_mask = True

    def __init__(
        self,
        module: nn.Module,
        runtime: StackRuntime,
        encoding: LayerEncoding,
        operand_factors: Callable[[nn.Module], tuple[float, float]] | None,
        native_bias: str,
    ) -> None:
        super().__init__(module, runtime, encoding)
        self.operand_factors = None if operand_factors is None else operand_factors(module)
        self.native_bias = native_bias
        # Other code may have keys from a cache of its own, which only the attention function shows.
        self.may_only_rotate = not self.is_other_code and POSITION_BIAS not in names_used(type(module).forward)
        #: The back-end of a call that has shown that only the map is needed while the bias is zero; `None` before it.
        self.near_backend: str | None = None
        #: Number of rotations so far in the rotary-only forward.
        self.rotations = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward with replaced globals, as few of them as the scheme needs."""
        self.awaited = False
        state = self.runtime.states.top if self.encoding.parts else None
        if state is None and self.encoding.parts and is_outside(self.runtime):
            return self.outside_stack(args, kwargs)
        near = self.encoding.only_rotates_near and self._has_near_pairs_only(args, kwargs)
        if self.may_only_rotate and (near or self.encoding.only_rotates) and POSITION_BIAS not in kwargs:
            if self.encoding.query_key_map is None:
                # A graph that read the flag would be compiled once more after a call with gradients has set it.
                if not torch.compiler.is_compiling() and not self.runtime.recomputation.has_run:
                    self.runtime.recomputation.check()
                return self._rotary_only_forward(self.module, *args, **kwargs)
            if not torch.compiler.is_compiling() and self.rotates_in_place:
                rotations = self.rotations
                output = self._rotary_only_forward(self.module, *args, **kwargs)
                if self.rotations == rotations:
                    self.refuse_skipped_rotation()
                return output
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        length, device = hidden_states.shape[1], hidden_states.device
        reorders = self.runtime.time_major or self.runtime.channels_first
        if state is not None and not reorders and state.is_for(length, device):
            call = LayerCall(state, hidden_states)
        else:
            call = self.begin_call(hidden_states)
        if call.state.held_by_layer:
            call.state = call.state.of_layer(self.module)
        if call.state.cache_object is None:
            call.state.cache_object = first_cache((*args, *kwargs.values()))
        calls = self.calls.of_this_thread()
        depth = len(calls)
        try:
            calls.append(call)
            if self.encoding.has_keys and self.intercepts_cache_update:
                cache = cache_of_call(args, kwargs, call.state.cache_object)
                with CacheUpdateHook(cache, self.update_cache, call):
                    output = self._forward(self.module, *args, **kwargs)
            else:
                output = self._forward(self.module, *args, **kwargs)
        finally:
            del calls[depth:]
        if not call.attended:
            raise UnsupportedError(
                f"{type(self.module).__name__} computed its attention without the attention interface (for example "
                "through reorder_and_upcast_attn), so the position encoding had no effect. Disable that code path."
            )
        if self.encoding.query_key_map is not None:
            self.note_rotation(call)
        return output

    def _has_near_pairs_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the bias is zero in this call, so that nothing but the map is needed, as in an earlier call."""
        state = self.runtime.states.top
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(state) is not ForwardState:
            return False
        if state.cache_object is None:
            # Before positions are looked at, which are recorded on the cache.
            state.cache_object = first_cache((*args, *kwargs.values()))
        backend = getattr(getattr(self.module, "config", None), "_attn_implementation", None)
        special = state.dropped or state.sequence is not None or state.end is None
        if special or "is_causal" in kwargs or backend is None or backend != self.near_backend:
            return False
        return all_positions_below(state, self.encoding.zero_below)

    def follow(self, rewritten: types.MethodType) -> None:
        """Runs another forward of the module with the scheme in place.

        Args:
            rewritten: a bound method that an inference engine has compiled from the source of the module's forward, to
                call its own layers. It has the globals of that forward.
        """
        self.inner = rewritten
        self._rebind_forward()

    def _rebind_forward(self) -> None:
        """The rotary-only forward replaces just the rotary functions, and records nothing about the call."""
        forward = inspect.unwrap(self._decorated)
        rotary = functions_called(forward)
        replaced: dict[str, Any] = {name: RotaryReplacement(function, self) for name, function in rotary.items()}
        # These return a query and its relative bias.
        relative = functions_called(forward, "_apply_relative")
        replaced |= dict.fromkeys(relative, lambda module, query, *others: (query, None))
        self._forward = self._with_globals(replaced | {INTERFACE: InterfaceReplacement(self)})
        fast = {name: _FastRotary(function, self) for name, function in rotary.items()}
        self._rotary_only_forward = self._with_globals(fast)

    def attend(
        self,
        implementation: str | None,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called in place of the attention function."""
        call = self.calls.top
        if call is None:
            raise UnsupportedError(
                f"The attention function of a {type(self.module).__name__} was called outside of its forward. A module "
                "that recomputes a part of itself (gradient checkpointing) does so. Checkpoint whole layers instead."
            )
        if query.shape[2] < call.hidden_states.shape[1]:
            self._refuse_parts(call, query.shape[2], key.shape[2])
        call.attended = True
        if self.is_other_code and not self.runtime.layout.has_axes:
            refuse_unknown_tokens(call.state, query.shape[2], key.shape[2], self.module)
        arguments: tuple[Any, ...] = ()
        # A graph of one layer cannot hold what other graphs have found.
        if self.encoding.checked_with is not None and not args and call.state.in_graph == torch.compiler.is_compiling():
            arguments = self._arguments(call, implementation, function, query, key, attention_mask, kwargs)
            checked = call.state.scratch.get(self.encoding.checked_with)
            output = None if checked is None else checked.attend(self, call, arguments, query, key, value)
            if output is not None:
                return output
        split = call.state.sequence is not None and self.encoding.logit_bias is not None
        if self.runtime.layout.has_axes:
            call = call.of_next(query.shape[2])
            self.refuse_pooled_keys(query.shape[2], key.shape[2])
            if isinstance(attention_mask, Tensor) and attention_mask.shape[-2:] == (1, 1) and key.shape[2] > 1:
                attention_mask = None  # The zero of a native bias that was silenced.
        self._check(query, attention_mask, kwargs)
        if call.rotated:
            self.check_rotated(call, query)
        paged = kwargs.get(PAGES) is not None
        if paged and self.encoding.reads_pages:
            key, value = read_pages(key, value, self.module.layer_idx, kwargs)
            self.require_mapped_pages(call)
        if self.encoding.query_key_map is not None and not call.rotations:
            query, key = self.map_before_kernel(call, query, key, self.factors_before(kwargs.get("scaling")))
        call.writes_pages = paged
        if POSITION_BIAS in kwargs or kwargs.get("scaling") is None:
            attention_mask = self._complete(query, attention_mask, kwargs)
        kernel = AttentionCall(implementation or EAGER, function, attention_mask, args, kwargs)
        if split:
            return attend_split(self, call, kernel, query, key, value)
        if paged and self.encoding.reads_pages:
            return attend_pages(self._attend, call, kernel, query, key, value)
        output = self._attend(call, kernel, query, key, value)
        if arguments and call.attention is not None and not (paged or self.runtime.layout.has_axes):
            checked = CheckedLayer.of(self, call, arguments, query, key)
            if checked is not None:
                call.state.scratch[self.encoding.checked_with] = checked
        return output

    def _refuse_parts(self, call: LayerCall, queries: int, keys: int) -> None:
        """Refuses a call with some of the queries, unless the scheme has done its work before or reads distances alone.

        Which queries they are is unknown, except in layouts that count them.
        """
        encoding = self.encoding
        mapped = encoding.query_key_map is None or call.rotations > 0
        if (mapped and encoding.logit_bias is None and encoding.logit_scale is None) or self.runtime.layout.has_axes:
            return
        if call.hidden_states.dim() == 3 and (queries < keys or call.attended or not encoding.repeats_bias):
            raise in_parts(type(self.module).__name__)

    def _arguments(
        self,
        call: LayerCall,
        implementation: str | None,
        function: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Everything that determines how attention is computed, except tensor values and the parts of the scheme."""
        shapes = (query.dtype, query.shape, key.shape, query.device, call.rotations)
        settings = (torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), *shapes)
        causal = getattr(self.module, "is_causal", None)
        if torch.compiler.is_compiling():
            # Tensors and functions cannot be compared in a graph.
            options = [item for item in kwargs.items() if not isinstance(item[1], Tensor)]
            number = number_in_graph(call.state.scratch, mask)
            return implementation, number, options, causal, self.native_bias, *settings
        written = mask._version if isinstance(mask, Tensor) and not mask.is_inference() else 0
        compared = dict(kwargs)
        if self.native_bias == "dropped":
            compared.pop(POSITION_BIAS, None)
        return function, mask, compared, causal, self.native_bias, *settings, written

    def _complete(self, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> Any:
        """Adds the default scaling to the options of a call. Returns the mask, with a bias of the model that stays."""
        if kwargs.get("scaling") is None and query.shape[-1] != self.encoding.head_dim:
            # The map has widened the heads, and a kernel derives its default scaling from their width.
            kwargs["scaling"] = self.default_scaling
        bias: Tensor | None = kwargs.pop(POSITION_BIAS, None)
        if bias is None or self.native_bias == "dropped":
            return mask
        if self.native_bias == "unknown":
            raise unknown_seam(
                f"{type(self.module).__name__} passes a `position_bias` to its attention function, and it is not known "
                "whether a scheme replaces it.",
                self.module,
            )
        if mask is None or mask.dtype != torch.bool:
            return bias if mask is None else mask + bias
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)

    def _attend(self, call: LayerCall, kernel: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """Adds scale and bias to mapped queries and keys, and calls the attention function."""
        flash = "flash" in kernel.name
        # A flash kernel refuses a pairwise bias. That should happen in the first call, while the bias is still zero.
        first = self.encoding.zero_below
        zero = first > 0 and not call.state.dropped and all_positions_below(call.state, first)
        known = not torch.compiler.is_compiling() and self.rotation_is_last
        if zero and not flash and known and self.encoding.only_rotates_near:
            self.near_backend = kernel.name
        form = None
        if self.encoding.logit_bias is not None and (flash or not zero):
            scaling = kernel.kwargs.get("scaling")
            factor = self.default_scaling if scaling is None else scaling
            heads = (query, key)
            if self.encoding.rotates_by_input:
                query, key = self.rotated_by_input(call, query, key)
            if not self.encoding.only_rotates_by_input:
                factors = (factor, *self.factors_before(factor))
                form = self.bias(call, *heads, factors, kernel.mask, flash, self.encoding.rotates_by_input)
        if self.encoding.logit_scale is not None:
            query = self.scaled(call.state, query)
        wide = self.encoding.widens_heads and kernel.name != EAGER and query.shape[2] > 1
        if form is not None:
            attend = attention_with(kernel, form, self.module, query, key)
            if wide:
                return attend_with_wide_values(attend, self.module, query, key, value)
            joins = self.encoding.logit_bias in self.encoding.joined
            if joins and isinstance(attend, MatrixAttention) and attend.form is form:
                pairs = call.pairs
                of_pairs = None if pairs is None else lambda: pairs
                if pairs is not None or (isinstance(form, FusedForm) and form.terms is None):
                    attend.known = self.rows_of_layers(call.state, attend.kernel, kernel.mask, of_pairs)
            call.form, call.attention = form, attend
            return attend(self.module, query, key, value)
        if query.shape[2] == 1 and is_single_query_of_sdpa(kernel):
            call.attention = functools.partial(single_query_attention, bias=None, scaling=kernel.kwargs.get("scaling"))
            return call.attention(self.module, query, key, value)
        attend = functools.partial(attend_with_wide_values, kernel.function) if wide else kernel.function
        return attend(self.module, query, key, value, kernel.mask, *kernel.args, **kernel.kwargs)

    def _check(self, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
        """Refuses another number of heads, and a call of a causal layer whose queries would see later keys.

        Without a mask, an attention function relies on the module's `is_causal`. With sdpa before transformers 5.18,
        the decoder of UMT5 has neither, and its queries see later tokens.
        """
        if query.shape[1] != self.encoding.num_heads:
            self.check_head_count(query)
        if mask is not None or not self.encoding.causal or query.shape[2] == 1:
            return
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(self.module, "is_causal", True) if is_causal is None else is_causal
        if is_causal is False:
            raise UnsupportedError(
                f"{type(self.module).__name__} belongs to a causal stack, but this call is not causal: no mask was "
                "passed and is_causal is False. Some versions of transformers omit the mask of a decoder. Load the "
                "model with attn_implementation='eager', or use another version of transformers."
            )


class InterfaceReplacement:
    """Replaces the attention interface in the globals of one patched module."""

    def __init__(self, site: Any) -> None:
        self.interface = inspect.unwrap(site._decorated).__globals__[INTERFACE]
        self.site = site

    def get_interface(self, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        """The attention function of the site."""
        function = self.interface.get_interface(implementation, default)
        site = self.site
        if not (implementation or "").startswith(PREFIX) or not site.encoding.reads_pages:
            return functools.partial(site.attend, implementation, function)

        def attention(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(PAGES) is not None:
                # `site.attend` reads the keys from their pages itself, so the plain attention function applies.
                plain = (implementation or EAGER).removeprefix(PREFIX)
                return site.attend(plain, self.interface.get_interface(plain, default), *args, **kwargs)
            return site.attend(implementation, function, *args, **kwargs)

        return attention

    def __getitem__(self, implementation: str) -> Callable[..., Any]:
        """The same, for code that was written for earlier versions of transformers."""
        return self.get_interface(implementation, self.interface[implementation])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.interface, name)


class RotaryReplacement:
    """Replaces a rotary function in the globals of one patched module."""

    def __init__(self, function: Callable[..., Any], site: Any) -> None:
        self.rotary = rotary_call(function)
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the rotary function of the module returns, with tensors that are mapped or unchanged."""
        if self.site.encoding.query_key_map is None and not self.site.runtime.layout.has_axes:
            if self.rotary.begins_with_heads and len(args) > 1:
                return args[:2]
            query, key, _ = self.rotary.tensors(args, kwargs)
            return query if key is None else (query, key)
        call = self.site.calls.top
        assert call is not None
        if self.site.is_other_code and not self.site.runtime.layout.has_axes:
            *heads, axis = self.rotary.tensors(args, kwargs)
            lengths = {each.shape[axis - 4] for each in heads if each is not None}
            if call.keys_mapped or lengths != {call.state.query_length}:
                raise rotates_cached_keys(self.site.module)
        return self.site.rotate(call, self.rotary, args, kwargs)


class _FastRotary(RotaryReplacement):
    """Replaces a rotary function in the rotary-only forward, which records nothing about the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, second, time_axis = self.rotary.tensors(args, kwargs)
        site = self.site
        if site.encoding.query_key_map is not None:
            site.rotations += 1
            packed = first.dim() == 3
            if packed:
                first, second = with_batch(first, second)
            length, state = first.shape[time_axis], site.runtime.states.top
            if state is None or not state.is_for(length, first.device):
                state = site.in_order(site.state_for(length, first.device), self.rotary, args, kwargs)
            first, second = site.apply_map(state, first, second, time_axis)
            if packed:
                return without_batch(first if second is None else (first, second))
        return first if second is None else (first, second)
