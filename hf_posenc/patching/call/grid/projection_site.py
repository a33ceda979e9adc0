"""The patch projection, whose output shows the grid of a call."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.patching.call.grid_state import GridState
from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.runtime import StackRuntime


class ProjectionSite(PlacedForward):
    """Stands in for the `forward` of a patch projection and records the sizes of the grid.

    Args:
        module: the convolution.
        runtime: the runtime of its stack.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime) -> None:
        self.module = module
        self.runtime = runtime

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the projection, `(batch, hidden, [frames,] rows, columns)`."""
        output = self.stock(*args, **kwargs)
        state = self.runtime.state
        if not self.retired and isinstance(state, GridState):
            # Patches that were cut out before are projected one by one, which shows no grid.
            state.grid = tuple(output.shape[2:]) if output.shape[2:].numel() > 1 else None
        return output
