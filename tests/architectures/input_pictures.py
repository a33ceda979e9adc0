"""Pictures and videos in the formats of the models: whole, in patches, in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .input_context import Context, pair_of_ints

#: Rows and columns of patches before merging, for models that take any size; the second for another resolution.
GRIDS = ((4, 8), (8, 4))
_VISION = ("vision_config", "image_config", "video_config", "backbone_config", "encoder_config", "encoder")


def _vision(context: Context) -> Any:
    return context.part(*_VISION)


def grid(context: Context) -> tuple[int, int]:
    """Rows and columns of patches of the picture, for models that take any size."""
    return GRIDS[context.size]


def _channels(context: Context) -> int:
    vision = _vision(context)
    names = ("in_channels", "num_channels", "in_chans", "input_channels", "image_channels")
    found = next((getattr(vision, name) for name in names if isinstance(getattr(vision, name, None), int)), None)
    return int(found or 3)


def _patch(context: Context) -> tuple[int, int]:
    vision = _vision(context)
    value = getattr(vision, "patch_size", None) or context.value("patch_size", 4)
    return pair_of_ints(value)


def picture_size(context: Context) -> tuple[int, int]:
    """Height and width in pixels."""
    vision = _vision(context)
    size = getattr(vision, "image_size", None) or context.first("image_size", "img_size", "spec_size") or 64
    height, width = pair_of_ints(size)
    return (height, width) if context.size == 0 else (height, width * 2)


def pixel_values(context: Context) -> Tensor | None:
    """(batch, channels, height, width), or what the other arguments of the forward say."""
    rows, columns = grid(context)
    height, width = _patch(context)
    if context.wants("image_grid_thw") or context.wants("grid_thw"):
        return flattened(context, frames=1)
    if context.value("image_grid_pinpoints") is not None:
        return context.normal(context.batch, 3, _channels(context), *picture_size(context))
    if context.wants("spatial_shapes"):
        return context.normal(context.batch, rows * columns, _channels(context) * height * width)
    if context.wants("image_position_ids") or context.wants("pixel_position_ids"):
        return context.normal(context.batch, rows * columns, _channels(context) * height * width).sigmoid()
    if context.pair.kind == "video":
        return pixel_values_videos(context)
    if context.wants("pixel_attention_mask") or context.wants("patch_attention_mask"):
        tiles = (1,) if context.wants("pixel_attention_mask") else ()
        return context.normal(context.batch, *tiles, _channels(context), *picture_size(context))
    return context.normal(context.batch, _channels(context), *picture_size(context))


def flattened(context: Context, frames: int) -> Tensor:
    """(patches of all pictures, values of a patch)."""
    rows, columns = grid(context)
    height, width = _patch(context)
    vision = _vision(context)
    temporal = getattr(vision, "temporal_patch_size", None) or 1
    temporal = temporal if isinstance(temporal, int) else 1
    temporal = getattr(vision, "patch_temporal", temporal)
    return context.normal(context.batch * frames * rows * columns, _channels(context) * temporal * height * width)


def grid_thw(context: Context) -> Tensor:
    """(pictures, 3): frames, rows, columns of patches."""
    return torch.tensor([[1, *grid(context)]] * context.batch)


def hidden_states(context: Context) -> Tensor | None:
    """Flattened patches, under the name that towers give them."""
    return flattened(context, frames=1) if context.wants("grid_thw") else None


def pixel_values_videos(context: Context) -> Tensor | None:
    """(batch, frames, channels, height, width); left out where a picture is given."""
    if "pixel_values" in context.given or context.given.get("input_features") is not None:
        return None
    vision = _vision(context)
    frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None) or 4
    return context.normal(context.batch, int(frames), _channels(context), *picture_size(context))


def spatial_shapes(context: Context) -> Tensor:
    """(pictures, 2): rows and columns of patches."""
    return torch.tensor([list(grid(context))] * context.batch)


def pixel_attention_mask(context: Context) -> Tensor | None:
    """Ones for every patch or pixel."""
    values = context.given.get("pixel_values")
    if values is None:
        return None
    if context.wants("spatial_shapes"):
        return torch.ones(values.shape[:2], dtype=torch.int64)
    return torch.ones(*values.shape[:-3], *values.shape[-2:], dtype=torch.bool)


def position_ids_of_patches(context: Context) -> Tensor:
    """(pictures, patches, 2): column and row of every patch."""
    rows, columns = grid(context)
    places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), dim=-1)
    return places.reshape(1, -1, 2).expand(context.batch, -1, -1).clone()


def image_sizes(context: Context) -> Tensor:
    """(pictures, 2): height and width in pixels."""
    size = (context.value("image_grid_pinpoints") or [list(picture_size(context))])[0]
    return torch.tensor([list(size)] * context.batch)


def merge_sizes(context: Context) -> Tensor:
    """(pictures,): how many patches are merged per axis."""
    return torch.full((context.batch,), 2)


def image_patches(context: Context) -> list[Tensor]:
    """Rows of a picture as patches (Fuyu)."""
    rows, columns = grid(context)
    height, width = _patch(context)
    return [context.normal(rows * columns, _channels(context) * height * width) for _ in range(context.batch)]


def flattened_patches(context: Context) -> Tensor:
    """(batch, patches, 2 + values): row and column from 1, then the values of a patch."""
    rows, columns = grid(context)
    height, width = _patch(context)
    values = context.normal(context.batch, rows * columns, _channels(context) * height * width)
    places = torch.cartesian_prod(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1))
    return torch.cat((places.expand(context.batch, -1, -1), values), dim=-1)


def high_resolution(context: Context) -> Tensor:
    """(batch, channels, height, width) for the second tower."""
    size = pair_of_ints(context.value("high_res_vision_config").image_size)
    return context.normal(context.batch, _channels(context), *size)


RULES: dict[str, Callable[[Context], Any]] = {
    "pixel_values": pixel_values,
    "high_res_pixel_values": high_resolution,
    "hidden_states": hidden_states,
    "image_grid_thw": grid_thw,
    "grid_thw": grid_thw,
    "pixel_values_videos": pixel_values_videos,
    "spatial_shapes": spatial_shapes,
    "pixel_attention_mask": pixel_attention_mask,
    "image_position_ids": position_ids_of_patches,
    "pixel_position_ids": position_ids_of_patches,
    "image_sizes": image_sizes,
    "image_merge_sizes": merge_sizes,
    "merge_sizes": merge_sizes,
    "image_patches": image_patches,
    "flattened_patches": flattened_patches,
}
