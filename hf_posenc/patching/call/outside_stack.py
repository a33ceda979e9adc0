"""Layers that are called outside the forward of their stack, such as by a loop over layers or a calibration tool.

The positions of such a call are not resolved yet. They follow from the arguments of the layer: its `position_ids`, its
mask, and the number of tokens that its cache holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache import first_cache, self_attention_cache, states_positions
from hf_posenc.patching.call.forward_state import ForwardState, padding_mask
from hf_posenc.patching.call.grid_state import split_axes
from hf_posenc.patching.forwards import named_arguments

if TYPE_CHECKING:
    from hf_posenc.patching.call.runtime import StackRuntime


def is_outside(runtime: StackRuntime) -> bool:
    """Whether a layer of text or sound is called outside of its stack, and not recomputed or compiled without it."""
    if runtime.states.top is not None or runtime.layout.has_axes or torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() == -1


def state_of_layer(
    runtime: StackRuntime, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> ForwardState:
    """The positions of a call outside of the stack.

    Args:
        runtime: that of the stack.
        module: the layer, or its attention.
        args: its arguments.
        kwargs: its arguments by name.
        length: number of new tokens.

    Raises:
        UnsupportedError: for a cache that drops tokens.
    """
    arguments = named_arguments(module, args, kwargs)
    cache, mask, ids = (first_cache(arguments.values()), *map(arguments.get, ("attention_mask", "position_ids")))
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.shape[-1] != length:
        ids = None
    # A mask of two axes may be one of pairs, or one of padding.
    shows = isinstance(mask, Tensor) and (mask.dtype == torch.bool or mask.is_floating_point()) == (mask.dim() == 4)
    offset = None
    if cache is not None:
        if states_positions(cache):
            raise UnsupportedError(
                f"{type(module).__name__} was called outside its model with a {type(cache).__name__}, which drops "
                "tokens, so the positions of its keys are unknown. Call the whole model, or use another cache."
            )
        keeper = self_attention_cache(cache)
        offset = int(keeper.get_seq_length(getattr(module, "layer_idx", None) or 0))
    elif ids is not None or mask is not None:
        offset = 0
    padding = padding_mask(mask, module, offset) if shows else None
    positions, coordinates = (None, None) if ids is None else split_axes(ids, runtime, cache, offset, padding)
    hides = mask is not None and padding is None
    return ForwardState(length, offset, positions, padding, coordinates, None, hides, cache)
