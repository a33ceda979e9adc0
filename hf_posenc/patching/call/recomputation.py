"""Gradient checkpointing: a layer is recomputed with the positions of its original call.

The recomputation happens after the call has ended, possibly after another call. The checkpointing function of every
layer is therefore wrapped to restore the state of its own call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.per_thread import PerThread

#: Attributes that hold the checkpointing function: in transformers' layers, and in FSDP's wrappers around them.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


class Recomputation:
    """Makes the layers of one stack recompute under the state of their original call.

    Args:
        states: the states of the calls in progress.
    """

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
        """Refuses to recompute a layer whose forward ran with another scheme, or without one.

        Raises:
            UnsupportedError: if the scheme has been removed, or has not run before this recomputation.
        """
        if self.removed or (not self.has_run and torch._C._current_graph_task_id() != -1):
            raise UnsupportedError(
                "A layer is recomputed in the backward pass (gradient checkpointing), but the position encoding of the "
                "model was placed, changed or removed after its forward, so the gradients would be those of another "
                "model. Call backward before patch_model and unpatch_model, or run the forward again."
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
                (parent._modules, name, one)
                for parent in stack.modules()
                for name, one in parent._modules.items()
                if one is not None and (hasattr(one, "gradient_checkpointing") or named & one.__dict__.keys())
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
            calls = states.own()
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

    def __init__(self, found: dict[Hashable, Any], first_run: dict[Hashable, Any]) -> None:
        super().__init__(found)
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
