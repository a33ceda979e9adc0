"""What the arguments of a call say about the grids of its images."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_posenc.patching.call.grid_places import places_of_images
from hf_posenc.patching.call.grid_state import GridState
from hf_posenc.patching.find.grids import FoundGrid

#: `(images, 2)`: the rows and columns of each image of a padded batch of patches.
_SIZES = "spatial_shapes"
#: `(images, rows, columns)`: true at the patches of each image of a padded batch.
_SHOWN = "patch_attention_mask"
#: `(images, 3)`: the frames, rows and columns of images that are packed in one row.
_PACKED = "grid_thw"
#: `(images, 2)`: the rows and columns of images that are packed in one row, each in raster order.
_PACKED_SIZES = "target_sizes"
#: A mask of patches that may be dropped: true where a patch is hidden.
_HIDDEN = "bool_masked_pos"
#: The function with which a model computes the `(patches, 2)` rows and columns of packed images, in the order in which
#: it merges patches.
_PLACES = "get_vision_position_ids"


def grid_state(stack: nn.Module, grid: FoundGrid, arguments: Mapping[str, Any]) -> GridState:
    """The state of a call, as far as its arguments show the grids."""
    state = GridState(-1, suffix_tokens=grid.suffix_tokens)
    given = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    state.grid = _of_pixels(stack.config, given)
    if _SIZES in given:
        state.sizes = given[_SIZES].long()
    if _SHOWN in given and given[_SHOWN].dim() == 3 and not given[_SHOWN].all():
        state.shown_patches = given[_SHOWN].bool()
    state.hidden_patches = given.get(_HIDDEN)
    if _PACKED_SIZES in given:
        state.coordinates = places_of_images(given[_PACKED_SIZES])
    places = inspect.unwrap(type(stack).forward).__globals__.get(_PLACES)
    if _PACKED in given and places is not None:
        # A stack whose patches are merged after it has them row by row, whatever its config says.
        merge = getattr(stack, "spatial_merge_size", 1)
        state.coordinates = places(given[_PACKED], merge).T.unsqueeze(1).long()
    return state


def _of_pixels(config: Any, given: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """The grid of whole images, until the projection shows it, and for stacks without a known projection."""
    pixels = next((value for value in given.values() if value.dim() in (4, 5)), None)
    patch = getattr(config, "patch_size", None)
    if pixels is None or patch is None:
        return None
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]
    rows, columns = (int(size) // int(side) for size, side in zip(pixels.shape[-2:], sides, strict=True))
    return (rows, columns) if rows and columns else None
