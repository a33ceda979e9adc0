"""Modules of a stack whose input is pixels that show the grid of a call: patch projections and rotary modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.call.grid_state import GridState, pixels_among
from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.call.view import Viewed
from hf_posenc.patching.find.forward_code import names_used

#: An argument without which a module refuses pictures of another size than its table has.
OTHER_SIZES = "interpolate_pos_encoding"
#: The attribute with that size, in pixels.
_SIZE = "image_size"


class ProjectionSite(PlacedForward):
    """Stands in for the `forward` of a patch projection and records the sizes of the grid."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the projection, `(batch, hidden, [frames,] rows, columns)`."""
        output = self.stock(*args, **kwargs)
        state = self.runtime.state
        if not self.retired and isinstance(state, GridState):
            # Patches that were cut out before are projected one by one, which shows no grid.
            state.grid = tuple(output.shape[2:]) if output.shape[2:].numel() > 1 else None
        return output


class PictureSite(Viewed, PlacedForward):
    """Stands in for the `forward` of a module that would refuse pictures of another size than its config states."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward as if its size were that of the pictures of the call."""
        if self.retired:
            return self.stock(*args, **kwargs)
        note_size(self.runtime, args, kwargs)
        return type(self.module).forward(self.view, *args, **kwargs)

    def replaced(self) -> dict[str, Any]:
        """The size."""
        return size_of_call(self.module, self.runtime)


def refuses_other_sizes(module: nn.Module) -> bool:
    """Whether a module compares the sizes of pictures with those of its config, to suit a position table."""
    size = module.__dict__.get(_SIZE)
    own: Any = type(module).forward
    return isinstance(size, tuple | list) and _SIZE in names_used(own) and OTHER_SIZES not in names_used(own)


def note_size(runtime: StackRuntime, args: Any, kwargs: dict[str, Any]) -> None:
    """Records the sizes of the pictures that such a module gets."""
    if isinstance(runtime.state, GridState):
        runtime.state.pixels = pixels_among((*args, *kwargs.values()))


def size_of_call(module: nn.Module, runtime: StackRuntime) -> dict[str, Any]:
    """A property of a view of such a module: the noted `(height, width)`, in pixels."""

    def size(view: Any) -> Any:
        state = runtime.state
        known = isinstance(state, GridState) and state.pixels is not None
        return state.pixels if known else module.__dict__[_SIZE]  # type: ignore[union-attr]

    return {_SIZE: property(size)}


class GridRotarySite(PlacedForward):
    """Stands in for the `forward` of a rotary module, records the coordinates of the call, and numbers its tokens.

    Some models bring their patches into another order after the phases are computed, for attention in windows. No layer
    uses the phases of the module while a scheme is in place, so they are replaced by the number of each token. What a
    layer receives then shows the order of its tokens.
    """

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns numbers in the shape of the phases, `(tokens, width)` each."""
        phases = self.stock(x, *args, **kwargs)
        position_ids = args[0] if args else kwargs.get("position_ids")
        state = self.runtime.state
        if self.retired or not isinstance(state, GridState) or not isinstance(position_ids, Tensor):
            return phases
        coordinates = _axes_first(position_ids)
        if coordinates is None:
            return phases
        state.coordinates = coordinates.unsqueeze(1).long()
        state.numbered = True
        return numbered(phases)


def _axes_first(position_ids: Tensor) -> Tensor | None:
    """`(axes, tokens)` from either order of the axes; `None` for positions on one axis."""
    if position_ids.dim() != 2:
        return None
    if position_ids.shape[1] in (2, 3):
        return position_ids.T
    return position_ids if position_ids.shape[0] in (2, 3) else None


def numbered(phases: Any) -> Any:
    """Numbers in the shape of phases, `(tokens, width)`: every value of a token is its number."""
    if isinstance(phases, tuple):
        return tuple(map(numbered, phases))
    numbers = torch.arange(phases.shape[-2], device=phases.device, dtype=torch.float32)
    return numbers.unsqueeze(-1).expand(phases.shape)


def numbers_in(phases: Any) -> Tensor:
    """`(length,)` int64: the numbers of the tokens of a layer, from the phases that it received."""
    values: Tensor = phases[0] if isinstance(phases, tuple) else phases
    return values[..., 0].reshape(-1).long()
