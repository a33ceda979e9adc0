"""Observing which layers of a stock model rotate, and with the phases of which rotary module.

Some layers of a rotary architecture do not rotate, and some architectures have several rotary modules. The code that
selects them differs between architectures, so the selection is observed in a short forward pass.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.forward_code import rebind
from hf_posenc.patching.find.rotary_call import rotary_call
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.short_runs import is_runnable, run_briefly
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.transaction import Transaction

_TOKENS = 3


@dataclass
class Rotation:
    """One call of a layer's rotary function.

    Args:
        function: the rotary function.
        phases: the cosines (or complex phases) passed to it, `(batch, query_len, width)`.
    """

    function: Any
    phases: Tensor


def observe_rotations(transaction: Transaction, stacks: list[Stack]) -> dict[str, Rotation]:
    """Runs the stock model on three tokens; returns the rotation of every layer that rotated, by attention path.

    Raises:
        UnsupportedError: if the model is on the meta device.
    """
    if not is_runnable(transaction.model):
        raise UnsupportedError(
            "The native scheme of a rotary model is determined by running it, but this model is on the meta device. "
            "Load its weights first."
        )
    seen: dict[str, Rotation] = {}
    journal = Journal()
    try:
        for stack in stacks:
            for attention in stack.attentions:
                if attention.rotary_functions:
                    path, forward = f"{stack.name}:{attention.path}", inspect.unwrap(type(attention.module).forward)
                    functions = {name: forward.__globals__[name] for name in attention.rotary_functions}
                    recorded = {name: _recording(function, path, seen) for name, function in functions.items()}
                    rebound = types.MethodType(rebind(forward, recorded), attention.module)
                    journal.set_forward(attention.module, rebound)
        run_briefly(transaction, stacks, _TOKENS)
    finally:
        # Inlined, because an interrupt may arrive between the call of a function and its first line.
        try:
            journal.undo()
        except BaseException:
            journal.undo()
            raise
    return seen


def _recording(function: Any, path: str, seen: dict[str, Rotation]) -> Any:
    rotary = rotary_call(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        phases = rotary.phases(args, kwargs)
        if isinstance(phases, Tensor):
            seen.setdefault(path, Rotation(function, phases.detach()))
        return function(*args, **kwargs)

    return record
