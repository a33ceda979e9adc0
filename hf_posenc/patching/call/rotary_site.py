"""Rotary modules and methods as a patched stack sees them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.call.scores_attention import ScoresAttention

#: For how many shapes of its arguments the look of a rotary module's phases is remembered.
_MOST_PLACEHOLDERS = 64


class RotaryModuleSite(PlacedForward):
    """Stands in for the `forward` of a rotary module: notes the positions it is asked for.

    Args:
        module: the rotary module.
        runtime: of its stack.
        unused: whether every layer's rotation is replaced or skipped, so that nobody looks at the phases. They are then
            computed once for each shape of the arguments, to see what they look like; later calls return numbers of
            the same shapes that are not there in memory, all of them NaN, so that anybody who did look would show it.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime, *, unused: bool) -> None:
        self.module = module
        self.runtime = runtime
        self.unused = unused
        self._placeholders: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_placeholders": {}}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Same as the module's own forward, or something that looks the same."""
        if self.retired:
            return self.stock(x, *args, **kwargs)
        position_ids = args[0] if args else kwargs.get("position_ids")
        state = self.runtime.state
        if state is not None and isinstance(position_ids, Tensor):
            state.rotary_position_ids = position_ids
            args, kwargs = _on_one_axis(self.module, position_ids, args, kwargs)
        if not self.unused or torch.compiler.is_compiling() or torch.jit.is_tracing():
            # What nobody uses a compiler leaves out by itself.
            return type(self.module).forward(self.module, x, *args, **kwargs)
        asked = (_signature(x), *map(_signature, args), *((name, _signature(value)) for name, value in kwargs.items()))
        placeholder = self._placeholders.get(asked)
        if placeholder is not None:
            return placeholder
        phases = type(self.module).forward(self.module, x, *args, **kwargs)
        if len(self._placeholders) >= _MOST_PLACEHOLDERS:
            self._placeholders.clear()
        self._placeholders[asked] = _placeholder(phases)
        return phases


def _on_one_axis(
    module: nn.Module, position_ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a rotary module, with the first axis of `(axes, batch, length)` if it knows one axis only.

    Before transformers 5.19 such a module multiplies matrices, and does not take three dimensions.
    """
    if position_ids.dim() != 3 or getattr(module, "mrope_section", None) is not None:
        return args, kwargs
    if args:
        return (position_ids[0], *args[1:]), kwargs
    return args, kwargs | {"position_ids": position_ids[0]}


def _signature(value: Any) -> Hashable:
    """All that the look of phases may depend on: of a tensor everything but its numbers."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _placeholder(phases: Any) -> Any:
    """Looks like the phases and holds one NaN; `None` for what is neither a tensor nor several."""
    if isinstance(phases, tuple):
        placeholders = tuple(map(_placeholder, phases))
        return None if None in placeholders else placeholders
    if not isinstance(phases, Tensor):
        return None
    with torch.inference_mode(False):
        return torch.full((), torch.nan, dtype=phases.dtype, device=phases.device).expand(phases.shape)


class RotaryMethodSite:
    """Stands in for an attention method `(phases, query, key)` that rotates both."""

    def __init__(self, site: ScoresAttention) -> None:
        self.site = site

    def __call__(self, phases: Any, query: Tensor, key: Tensor) -> Any:
        """`query` and `key` are `(batch, heads, query_len, head_dim)`."""
        return self.site.rotate_pair(query, key)
