"""Observing which layers of a stock model rotate, and with the phases of which rotary module.

Some layers of a rotary architecture do not rotate, and some architectures have several rotary modules. The code that
selects them differs between architectures, so the selection is observed in a short forward pass.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.forward_code import rebind
from hf_posenc.patching.anatomy.rotary_call import rotary_call
from hf_posenc.patching.anatomy.short_runs import run_briefly
from hf_posenc.patching.anatomy.sites import Stack

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy
    from hf_posenc.patching.anatomy.layout import TemporaryChanges

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


def observe_rotations(anatomy: Anatomy, stacks: list[Stack], changes: TemporaryChanges) -> dict[str, Rotation]:
    """Runs the stock model on three tokens; returns the rotation of every layer that rotated, by attention path.

    Raises:
        UnsupportedError: if the model is on the meta device.
    """
    if not anatomy.is_runnable:
        raise UnsupportedError(
            "The native scheme of a rotary model is determined by running it, but this model is on the meta device. "
            "Load its weights first."
        )
    seen: dict[str, Rotation] = {}
    forwards: list[tuple[nn.Module, Any]] = []
    for stack in stacks:
        for attention in stack.attentions:
            if attention.rotary_functions:
                path, forward = f"{stack.name}:{attention.path}", inspect.unwrap(type(attention.module).forward)
                functions = {name: forward.__globals__[name] for name in attention.rotary_functions}
                recorded = {name: _recording(function, path, seen) for name, function in functions.items()}
                forwards.append((attention.module, types.MethodType(rebind(forward, recorded), attention.module)))
    with changes.with_forwards(forwards):
        run_briefly(anatomy, stacks, _TOKENS)
    return seen


def _recording(function: Any, path: str, seen: dict[str, Rotation]) -> Any:
    rotary = rotary_call(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        phases = rotary.phases(args, kwargs)
        if isinstance(phases, Tensor):
            seen.setdefault(path, Rotation(function, phases.detach()))
        return function(*args, **kwargs)

    return record
