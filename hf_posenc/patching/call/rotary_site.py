"""Replacements of the rotary modules and rotary methods of a patched stack."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.runtime import StackRuntime

#: Maximum number of placeholders that are stored for one rotary module.
_MAX_PLACEHOLDERS = 64


class RotaryModuleSite(PlacedForward):
    """Stands in for the `forward` of a rotary module and records the positions that the model passes to it.

    Args:
        module: the rotary module.
        runtime: the runtime of its stack.
        unused: whether the rotation of every layer is replaced or skipped, so that the phases are unused. They are
            then computed only once for each shape of the arguments. Later calls return placeholders of the same
            shapes, a single NaN expanded without using memory, so that any accidental use shows up as NaN.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime, *, unused: bool) -> None:
        super().__init__(module, runtime)
        self.unused = unused
        #: Whether the phases of no rotation are returned: another module rotates queries with them (PEFT's prompts).
        self.neutral = False
        self._placeholders: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_placeholders": {}}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the phases of the module's own forward, or placeholders of the same shapes if they are unused."""
        if self.retired:
            return self.stock(x, *args, **kwargs)
        position_ids = args[0] if args else kwargs.get("position_ids")
        state = self.runtime.state
        if state is not None and isinstance(position_ids, Tensor):
            state.rotary_position_ids = position_ids
            args, kwargs = _on_one_axis(self.module, position_ids, args, kwargs)
        if self.neutral:
            cos, sin = type(self.module).forward(self.module, x, *args, **kwargs)
            return torch.ones_like(cos), torch.zeros_like(sin)
        if not self.unused or torch.compiler.is_compiling() or torch.jit.is_tracing():
            # A compiler removes unused phases by itself.
            return type(self.module).forward(self.module, x, *args, **kwargs)
        signature = (
            _signature(x),
            *map(_signature, args),
            *((name, _signature(value)) for name, value in kwargs.items()),
        )
        placeholder = self._placeholders.get(signature)
        if placeholder is not None:
            return placeholder
        phases = type(self.module).forward(self.module, x, *args, **kwargs)
        if len(self._placeholders) >= _MAX_PLACEHOLDERS:
            self._placeholders.clear()
        self._placeholders[signature] = _placeholder(phases)
        return phases


def _on_one_axis(
    module: nn.Module, position_ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a rotary module, reduced from `(axes, batch, length)` to the first axis if it supports only one.

    Before transformers 5.19 such a module uses a matrix product that does not accept three dimensions.
    """
    if position_ids.dim() != 3 or getattr(module, "mrope_section", None) is not None:
        return args, kwargs
    if args:
        return (position_ids[0], *args[1:]), kwargs
    return args, kwargs | {"position_ids": position_ids[0]}


def _signature(value: Any) -> Hashable:
    """The properties of an argument that determine the shape, dtype and device of the phases."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _placeholder(phases: Any) -> Any:
    """A NaN expanded to the shape of the phases; `None` if they are neither a tensor nor a tuple of tensors."""
    if isinstance(phases, tuple):
        placeholders = tuple(map(_placeholder, phases))
        return None if None in placeholders else placeholders
    if not isinstance(phases, Tensor):
        return None
    with torch.inference_mode(False):
        return torch.full((), torch.nan, dtype=phases.dtype, device=phases.device).expand(phases.shape)
