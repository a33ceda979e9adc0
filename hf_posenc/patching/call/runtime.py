"""The link between a stack's forward call and the patched modules inside it.

A stack is a `PreTrainedModel` that owns attention layers: `LlamaModel`, `BartEncoder`, `T5Stack`. Its forward is
replaced on the instance, and provides the `ForwardState` of the call in progress to the patched modules.

Under gradient checkpointing, a layer is recomputed after the call has ended, possibly after another call. The
checkpointing function of every layer is therefore wrapped to restore the state of its own call.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable, Hashable, Iterable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.rotary_functions import AXES
from hf_posenc.patching.call.cache import (
    GENERATION,
    cache_among,
    cached_length,
    first_cache,
    has_given_positions,
    kept_values,
    matches_keys,
    note_of,
    remember_keys,
    remember_length,
    self_attention_cache,
    set_note,
    states_positions,
)
from hf_posenc.patching.call.cache_checks import SCHEME, check_cached_scheme, refuse_tensors
from hf_posenc.patching.call.evicting_cache import evicting_state
from hf_posenc.patching.call.forward_state import (
    UNKNOWN,
    ForwardState,
    for_every_token,
    one_axis,
    padding_mask,
)
from hf_posenc.patching.call.grid_state import split_axes
from hf_posenc.patching.call.key_positions import differs_from_expected
from hf_posenc.patching.call.module_sites import SlotBuffers
from hf_posenc.patching.call.parallel import refuse_unsynchronised
from hf_posenc.patching.call.split_sequence import gathers_keys, split_sequence
from hf_posenc.patching.forwards import PlacedForward, RetiredForward, Viewed, forward_parameters, named_arguments
from hf_posenc.schemes.config import SchemeConfig, name_own_code
from hf_posenc.schemes.weights import AlikeParts, KeptValues, carries_more

if TYPE_CHECKING:
    from hf_posenc.patching.place.generation import CheckedContinuousBatching
    from hf_posenc.patching.place.stack_record import StackRecord

Value = TypeVar("Value")
_MAIN_THREAD = threading.main_thread().ident
#: Attributes that hold the checkpointing function: in transformers' layers, and in FSDP's wrappers around them.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


class PerThread(Generic[Value]):
    """Values of the calls in progress on each thread, the innermost on top.

    A call pushes its value and removes it even if an error or an interrupt occurs::

        own = values.of_this_thread()
        depth = len(own)
        try:
            own.append(value)
            ...
        finally:
            del own[depth:]

    The last line calls no function, so Python cannot deliver a signal before it completes. It also removes values that
    inner calls have left behind.
    """

    def __init__(self) -> None:
        self._main: list[Value] = []
        self._others: dict[int, list[Value]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_main": [], "_others": {}}

    def of_this_thread(self) -> list[Value]:
        """The calling thread's own stack."""
        # The id of a thread cannot be traced, so compiled code always uses the stack of the main thread.
        if is_compiling() or get_ident() == _MAIN_THREAD:
            return self._main
        return self._others.setdefault(get_ident(), [])

    @property
    def in_progress(self) -> bool:
        """Whether a call is in progress on any thread."""
        return bool(self._main) or any(self._others.values())

    @property
    def top(self) -> Value | None:
        """The value on top, or `None`."""
        # Inlined for speed, because every layer reads it.
        values = self._main if is_compiling() or get_ident() == _MAIN_THREAD else self._others.get(get_ident())
        return values[-1] if values else None


class Recomputation:
    """Makes the layers of one stack recompute under the state of their original call."""

    def __init__(self, states: PerThread[ForwardState]) -> None:
        self.states = states
        #: Whether the scheme has been removed from the model.
        self.removed = False
        #: Whether a layer has run since the scheme was placed.
        self.has_run = False
        #: Modules that may be checkpointed: the children of the parent module, the name among them, and the module.
        self._places: list[tuple[dict[str, nn.Module | None], str, nn.Module]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_places": None}

    def check(self) -> None:
        """Refuses to recompute a layer whose forward ran with another scheme, or without one."""
        if self.removed or (not self.has_run and torch._C._current_graph_task_id() != -1):
            raise UnsupportedError(
                "A layer is recomputed in the backward pass (gradient checkpointing), but the position encoding of the "
                "model was placed, changed or removed after its forward, so the gradients would be wrong. Call "
                "backward before patch_model and unpatch_model, or run the forward again."
            )
        self.has_run = True

    def keep_state(self, stack: nn.Module) -> None:
        """Wraps the checkpointing function of every layer of the stack that has one."""
        for module in self._candidates(stack):
            for name in _CHECKPOINT_FUNCTIONS:
                checkpoint = module.__dict__.get(name)
                if checkpoint is not None and not isinstance(checkpoint, CheckpointWithState):
                    module.__dict__[name] = CheckpointWithState(checkpoint, self)

    def _candidates(self, stack: nn.Module) -> Iterable[nn.Module]:
        """The modules that may be checkpointed. The search is repeated only if one of them has been replaced."""
        if torch.compiler.is_compiling():
            return stack.modules()
        if self._places is None or any(children.get(name) is not module for children, name, module in self._places):
            # Layers, wrappers around them, and patched attention, which may be wrapped later.
            named = {*_CHECKPOINT_FUNCTIONS, "forward"}
            self._places = [
                (parent._modules, name, child)
                for parent in stack.modules()
                for name, child in parent._modules.items()
                if child is not None and (hasattr(child, "gradient_checkpointing") or named & child.__dict__.keys())
            ]
        return (stack, *(module for _, _, module in self._places))


class CheckpointWithState:
    """A layer's gradient checkpointing function that replays the layer under the state of its own call."""

    def __init__(self, checkpoint: Callable[..., Any], recomputation: Recomputation) -> None:
        self.checkpoint = checkpoint
        self.recomputation = recomputation

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `checkpoint(function, ...)`.

        The second run starts with the same shared values as the first and computes the others again, because torch
        compares the tensors that both runs save for the backward pass.
        """
        states = self.recomputation.states
        state = states.top
        scratch, memo = ({}, {}) if state is None else (dict(state.scratch), dict(state.memo))

        def replay(*inputs: Any, **options: Any) -> Any:
            if state is None or states.top is state:
                return function(*inputs, **options)
            self.recomputation.check()
            calls = states.of_this_thread()
            depth = len(calls)
            try:
                calls.append(dataclasses.replace(state, scratch=dict(scratch), memo=_ReplayedMemo(memo, state.memo)))
                return function(*inputs, **options)
            finally:
                del calls[depth:]

        return self.checkpoint(replay, *args, **kwargs)


class _ReplayedMemo(dict[Hashable, Any]):
    """The memo of a second run. Random values drawn again are replaced by those of the first run.

    They are still drawn, so that the random generator has the same state in both runs for dropout later on.
    """

    def __init__(self, values: dict[Hashable, Any], first_run: dict[Hashable, Any]) -> None:
        super().__init__(values)
        self.first_run = first_run

    def __setitem__(self, name: Hashable, value: Any) -> None:
        super().__setitem__(name, self.first_run.get(name, value))


def unwrap_checkpointing(stack: nn.Module) -> None:
    """Undoes `Recomputation.keep_state`."""
    for module in stack.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            checkpoint = module.__dict__.get(name)
            if isinstance(checkpoint, CheckpointWithState):
                module.__dict__[name] = checkpoint.checkpoint


#: Arguments of a stack with one row per token.
_TOKENS = ("input_ids", "inputs_embeds", "input", "hidden_states")


class StackRuntime:
    """Holds the `ForwardState` of the call in progress of one stack."""

    def __init__(self, scheme: SchemeConfig, stack: Stack) -> None:
        self.scheme = scheme
        self.states: PerThread[ForwardState] = PerThread()
        self.recomputation = Recomputation(self.states)
        self.time_major = stack.architecture.time_major
        self.channels_first = stack.architecture.channels_first
        #: Whether the model looks up its tables by the `position_ids` of the caller, instead of counting slots.
        self.reads_position_ids = "position_ids" in forward_parameters(type(stack.module))
        #: What the tokens of the stack are.
        self.layout = stack.layout
        #: Holds the view on which the stack's own forward runs, with other tables or another number of frames; `None`
        #: if it runs unchanged. Set while the scheme is in place.
        self.viewed: Viewed | None = None
        #: Whether the stack appends padding, until the number of its tokens is a multiple of a window or a block.
        #: What is added to such tokens has no effect, so they get zeros.
        self.appends_padding = stack.sparse
        #: Whether a part of the scheme reads positions on several axes.
        self.reads_coordinates = False
        #: Whether the model itself makes positions on several axes (M-RoPE).
        self.makes_coordinates = stack.reads_axes
        #: Why the scheme needs all tokens of a sequence in one process; empty if it does not.
        self.split_problem = ""
        #: Whether cross-attention has a scheme.
        self.reads_encoder = False
        #: Number of forward calls with gradients so far.
        self.trainings = 0
        self.slots = SlotBuffers(max((table.origin for table in stack.tables), default=0))
        #: Checks that every module of the stack still carries its replacement; set while the scheme is in place.
        self.watch: StackRecord | None = None
        #: The numbers of patched attention modules that have not run since the stack was last searched.
        self.unattended: tuple[int, ...] = ()
        #: Checks the pages of continuous batching; set while the scheme is in place.
        self.pages: CheckedContinuousBatching | None = None
        #: The parts, if they have parameters that a wrapper around the model must have; set while they are in place.
        self.replicas: nn.Module | None = None

    def batch_first(self, hidden_states: Tensor) -> Tensor:
        """Permutes the hidden states of this architecture's layers to `(batch, length, hidden)`."""
        if self.time_major:
            return hidden_states.transpose(0, 1)
        return hidden_states.transpose(1, 2) if self.channels_first else hidden_states

    def state_for(self, query_length: int, device: torch.device, window: tuple[int, ...] | None = None) -> ForwardState:
        """The current state for a module on `device`, or a default state for a layer called outside its stack.

        `window` are the sizes of the windows of patches in which the module works, if it may.

        Raises:
            UnsupportedError: if there is no state because a layer is recomputed by an unknown checkpointing function,
                or because a layer is compiled without its stack.
        """
        state = self.states.top
        if state is not None and state.device != device:
            state = state.on(device)
        if state is not None and state.query_length == UNKNOWN:
            return state.shared(("tokens", window), lambda: state.by_slots(query_length, window), query_length)
        if state is not None:
            return state
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "A compiled layer was called outside its model, or from a thread other than the main thread, so the "
                "positions of its tokens are unknown. Compile the whole model, and call it from the main thread."
            )
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                "A layer is being recomputed in the backward pass by a checkpointing function that does not restore "
                "the positions of its forward. Use model.gradient_checkpointing_enable(), or torch's "
                "checkpoint_wrapper around layers before the first forward."
            )
        return ForwardState(query_length, offset=None, device=device)


class StackForward(PlacedForward):
    """Stands in for the `forward` of a stack: resolves the positions of a call, and discards them at its end.

    This is a forward and not a pair of hooks, because torch does not run a post-hook after a `KeyboardInterrupt` or a
    `SystemExit`, and does run it after a call that failed before its pre-hook.
    """

    __wrapped__ = RetiredForward.__wrapped__

    @property
    def __code__(self) -> types.CodeType:
        """The code of the original forward, whose file and line torch.export records."""
        return type(self.module).forward.__code__

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the stack, on a view of it if tables or the number of frames must differ."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        viewed = self.runtime.viewed
        return type(self.module).forward(self.module if viewed is None else viewed.view, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stack's own forward with the state of this call in place."""
        if torch.compiler.is_compiling():
            gathers = torch.distributed.is_available() and gathers_keys(self.runtime)
            if gathers or has_given_positions(cache_among(named_arguments(self.module, args, kwargs))):
                return self._run_outside_graphs(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.runtime.watch is not None:
            self.runtime.watch.check()
        if self.runtime.replicas is not None:
            refuse_unsynchronised(self.runtime.replicas)
        calls = self.runtime.states.of_this_thread()
        depth = len(calls)
        try:
            state, args, kwargs = self._resolve(args, kwargs)
            if self.runtime.reads_encoder:
                state.encoder_mask = named_arguments(self.module, args, kwargs).get("encoder_attention_mask")
            known, scheme = None, self.runtime.scheme
            if state.cache_object is not None and not torch.compiler.is_compiling():
                # A graph that read the note would be compiled once more after it has set it.
                known = note_of(self_attention_cache(state.cache_object), SCHEME)
            if state.cache_object is not None and known is not scheme:
                check_cached_scheme(state.cache_object, scheme)
            calls.append(state)
            if torch.is_grad_enabled():
                self.runtime.recomputation.has_run = True
                if not is_compiling():
                    self.runtime.trainings += 1
                    if self.module.training and self.runtime.watch is not None and self.runtime.watch.frozen:
                        self.runtime.watch.warn_of_frozen()
                self.runtime.recomputation.keep_state(self.module)
            if self.inner is not None and self.runtime.viewed is not None and state.query_length == UNKNOWN:
                raise UnsupportedError(
                    f"The forward of this {type(self.module).__name__} was replaced by another library before it was "
                    "patched, so its number of frames cannot be set for each call. Remove that forward, and patch "
                    "again."
                )
            result = self.stock(*args, **kwargs)
            if self.runtime.unattended and self.runtime.watch is not None:
                self.runtime.watch.refuse_unattended()
            cache = state.cache_object
            if cache is None and isinstance(result, tuple | dict):
                # The model has made it, and no layer had to look at it.
                cache = first_cache(result.values() if isinstance(result, dict) else result)
            if cache is not None:
                remember_keys(cache)
                remember_length(cache, state.end)
                if known is not scheme:
                    set_note(self_attention_cache(cache), SCHEME, scheme)
            return result
        except Exception as error:
            name_own_code(error, self.runtime.scheme)
            raise
        finally:
            del calls[depth:]

    # Disabled for the whole call: a single compiled frame could read values that another frame computed outside a
    # graph.
    _run_outside_graphs = torch.compiler.disable(
        _run,
        reason="The cached tokens have position_ids with gaps or jumps, which a compiled graph cannot read, or keys "
        "are exchanged with other processes. Run this call without torch.compile, or compile without fullgraph=True.",
    )

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ForwardState, tuple[Any, ...], dict[str, Any]]:
        """Resolves the positions of this call.

        Returns:
            The state and the arguments of the call. If positions have several axes, none of which is
            the place in the sequence, and the caller passed no mask, a mask of ones is added: without a mask
            transformers looks for packed documents in the positions.
        """
        stack = self.module
        layout = self.runtime.layout
        if layout.has_axes:
            return layout.state_of_call(stack, args, kwargs), args, kwargs
        arguments = named_arguments(stack, args, kwargs) if args else kwargs
        tokens = next((arguments[name] for name in _TOKENS if arguments.get(name) is not None), None)
        named = layout.features if tokens is None else ()
        features = next((arguments[name] for name in named if isinstance(arguments.get(name), Tensor)), None)
        if tokens is None and features is None:
            tokens = next((value for value in args if isinstance(value, Tensor)), None)
        query_length = 0 if tokens is None else tokens.shape[1]
        cache = cache_among(arguments)
        if cache is None and any(isinstance(value, tuple | list) for value in arguments.values()):
            refuse_tensors(arguments, self.runtime.scheme)
        if self.runtime.pages is not None and arguments.get("cu_seq_lens_k") is not None and cache is not None:
            self.runtime.pages.check(cache)
        offset = cached_length(cache)
        if isinstance(offset, int) and self.runtime.slots.shortest != 0:
            # Blocks appended as padding are shorter than a text that is longer than the buffers.
            self.runtime.slots.reach(stack, (offset + query_length) * (2 if self.runtime.appends_padding else 1))
        sequence = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            whole = features is None and (cache is None or (offset == 0 and not states_positions(cache)))
            sequence = split_sequence(self.runtime, stack, arguments, query_length if whole else 0)
        if cache is not None and states_positions(cache):
            given = arguments.get("position_ids")
            given = None if given is None else for_every_token(one_axis(given), tokens)
            if given is not None:
                kwargs = self.runtime.slots.reach_positions(stack, given, tokens, args, kwargs)
            state, columns = evicting_state(cache, stack, tokens, given, arguments.get("attention_mask"))
            if columns is not None:
                args, kwargs = (), arguments | kwargs | {"attention_mask": columns}
            return state, args, kwargs
        mask = arguments.get("attention_mask")
        position_ids, coordinates = arguments.get("position_ids"), None
        padding = None if mask is None else padding_mask(mask, stack, offset, position_ids is not None)
        if position_ids is not None:
            position_ids, coordinates = split_axes(position_ids, self.runtime, cache, offset, padding)
        if position_ids is not None and features is None and not torch.compiler.is_compiling():
            position_ids = for_every_token(position_ids, tokens)
        generation = None if torch.compiler.is_compiling() else GENERATION.get()
        shows_padding = offset is not None and (padding is not None or mask is None)
        counted = position_ids if generation is not None and coordinates is None and shows_padding else None
        position_ids = position_ids if counted is None else None
        if position_ids is not None:
            kwargs = self.runtime.slots.reach_positions(stack, position_ids, tokens, args, kwargs)
        token_ids = arguments.get("input_ids")
        changed = cache is not None and not matches_keys(cache)
        if features is not None:
            given = ForwardState(UNKNOWN, offset, position_ids, padding, cache_object=cache, cache_changed=changed)
            given.expected = 0 if layout.fixed_input is None else layout.fixed_input.tokens(features.shape[-1])
            return given, args, kwargs
        state = ForwardState(
            query_length,
            offset,
            position_ids,
            padding,
            coordinates,
            token_ids if isinstance(token_ids, Tensor) and token_ids.dim() == 2 else None,
            mask is not None and padding is None,
            cache,
            changed,
            sequence=sequence,
        )
        if torch.is_grad_enabled() and self.runtime.watch is not None and not torch.compiler.is_compiling():
            layers = self.runtime.watch.encoding.layers
            state.memo[AlikeParts] = AlikeParts(lambda: ((layer.kind, layer.parts) for layer in layers))
        # The weights of a transformed call cannot be told from others.
        keeps = cache is not None and not (torch.is_grad_enabled() or carries_more())
        if keeps and not torch.compiler.is_compiling():
            starts = offset == 0 if isinstance(offset, int) else query_length > 1
            state.memo[KeptValues] = kept_values(cache, starts, self.runtime.trainings)
        if generation is not None and counted is not None:
            generation.compare(differs_from_expected(state.on(counted.device), counted))
        shows_packing = coordinates is not None and arguments["position_ids"].shape[0] > AXES
        if coordinates is None or shows_packing or mask is not None or not isinstance(offset, int):
            return state, args, kwargs
        ones = coordinates.new_ones(coordinates.shape[1], offset + query_length)
        return state, args, kwargs | {"attention_mask": ones}
