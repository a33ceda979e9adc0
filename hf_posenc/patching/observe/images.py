"""Small images for short runs of models whose input is pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.architectures.example_inputs import numbers
from hf_posenc.patching.find.forward_code import forward_parameters
from hf_posenc.patching.find.model_parts import pixel_argument

#: Pixels of a side if the config does not state the size of its images.
_SIDE = 64


def pixels(model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """The arguments of a model for one image, or one video, of the size in its config.

    The values are fixed, so that the caller's random generator is not used.
    """
    config = model.config
    names = forward_parameters(type(model))
    if "grid_thw" in names:
        return _packed(model, device)
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or _SIDE
    sides = (size, size) if isinstance(size, int) else tuple(int(one) for one in size[-2:])
    channels = int(getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3)
    shape: tuple[int, ...] = (1, channels, *sides)
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    if isinstance(frames, int):
        shape = (1, frames, channels, *sides)
    given = {_name(model): _noise(shape, model, device)}
    if "patch_attention_mask" in names:
        rows, columns = (side // step for side, step in zip(sides, patch_size(model), strict=True))
        given["patch_attention_mask"] = torch.ones(1, rows, columns, dtype=torch.bool, device=device)
    if "spatial_shapes" in names:
        rows, columns = patch_size(model)
        given[_name(model)] = _noise((1, 4, channels * rows * columns), model, device)
        given["spatial_shapes"] = torch.tensor([[2, 2]], device=device)
        given["pixel_attention_mask"] = torch.ones(1, 4, dtype=torch.int64, device=device)
    return given


def _packed(model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Patches of one image, already cut out."""
    config = model.config
    merge = int(getattr(config, "spatial_merge_size", 1))
    rows, columns = patch_size(model)
    frames = int(getattr(config, "temporal_patch_size", 1))
    channels = int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)
    values = _noise((4 * merge * merge, channels * frames * rows * columns), model, device)
    given = {_name(model): values, "grid_thw": torch.tensor([[1, 2 * merge, 2 * merge]], device=device)}
    if "merge_sizes" in forward_parameters(type(model)):
        given["merge_sizes"] = torch.tensor([merge], device=device)
    return given


def _noise(shape: tuple[int, ...], model: PreTrainedModel, device: torch.device) -> Tensor:
    return numbers(*shape).to(device=device, dtype=model.dtype)


def patch_size(model: PreTrainedModel) -> tuple[int, int]:
    """Rows and columns of a patch, in pixels."""
    size = getattr(model.config, "patch_size", 16)
    return (size, size) if isinstance(size, int) else tuple(int(one) for one in size[-2:])  # type: ignore[return-value]


def _name(model: PreTrainedModel) -> str:
    name = pixel_argument(model)
    if name is None:
        parameters = list(forward_parameters(type(model)))[1:8]
        raise UnsupportedError(
            f"{type(model).__name__} takes images in an unknown form, so it cannot be run to find out how it uses "
            f"positions, and the places of its patches are unknown (its arguments: {', '.join(parameters)})."
        )
    return name
