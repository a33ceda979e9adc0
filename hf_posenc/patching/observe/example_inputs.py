"""An image, or a series of features, for short runs of stacks that read pixels, sound or time series."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.architectures.example_inputs import FRAMES, SAMPLES, numbers
from hf_posenc.patching.find.discovery import WIDTHS, first_int
from hf_posenc.patching.find.forward_code import forward_parameters
from hf_posenc.patching.find.model_parts import pixel_argument
from hf_posenc.patching.find.series import SOURCE_LENGTH

#: Pixels of a side if the config does not state the size of its images.
_SIDE = 64
#: The projection of keys in cross-attention.
_CROSS_KEYS = re.compile(r"(cross_attn|cross_attention|encoder_attn|encoder_attention)\.k_proj$")
#: Patches of a time series.
_PATCHES = 16
#: Config attributes for the number of features of a frame.
_USUAL_BINS = 80
_BINS = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "input_feat_size")


class NotRunnableError(UnsupportedError):
    """A model cannot be run on inputs that this package makes."""


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
        raise NotRunnableError(
            f"{type(model).__name__} takes images in an unknown form, so it cannot be run to find out how it uses "
            f"positions, and the places of its patches are unknown (its arguments: {', '.join(parameters)})."
        )
    return name


def series(model: PreTrainedModel, device: torch.device, *, constant: bool = False) -> dict[str, Any]:
    """The arguments of a stack for one series.

    Args:
        model: the stack.
        device: where the arguments are created.
        constant: whether all frames are equal, or all patches of a time series. The values are otherwise fixed numbers,
            so that the caller's random generator is not used.

    Raises:
        NotRunnableError: if the stack needs an argument that is not known.
    """
    parameters = forward_parameters(type(model))
    given: dict[str, Any] = {}
    for name, rule in _RULES.items():
        if name in parameters:
            value = rule(model, given)
            if value is not None:
                given[name] = value.to(device)
    needed = [
        name
        for name, parameter in list(parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in given
    ]
    if needed:
        raise NotRunnableError(
            f"{type(model).__name__} needs {' and '.join(needed)}, which is not known, so it cannot be run to find out "
            f"how it uses positions (its arguments: {', '.join(list(parameters)[1:8])})."
        )
    if constant:
        axes = _time_axes(given, model)
        period = first_int(model.config, ("patch_length",), 1) if "past_values" in given else 1
        given = {name: _periodic(value, axes.get(name), period) for name, value in given.items()}
    return given


def embeddings(model: PreTrainedModel, device: torch.device, length: int, width: int | None = None) -> Tensor:
    """`(1, length, hidden)` in place of the embeddings of a stack, or of another width."""
    if width is None:
        width = first_int(model.config, WIDTHS)
    return numbers(1, length, width).to(device=device, dtype=model.dtype)


def cross_attention_width(model: PreTrainedModel) -> int | None:
    """Width of the encoder's output that a decoder reads; `None` if it has no cross-attention."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _CROSS_KEYS.search(path):
            return module.in_features
    return None


def starts_with_bins(model: nn.Module) -> bool:
    """Whether features are `(batch, bins, frames)`: the stack passes them to a convolution of its own."""
    return any(isinstance(child, nn.Conv1d) for child in model.children())


def _bins(model: PreTrainedModel) -> int:
    """Number of features of a frame, from the config or the first layer with weights."""
    stated = first_int(model.config, _BINS)
    if stated:
        return stated
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            break
        if isinstance(module, nn.Conv1d):
            return module.in_channels
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
    return _USUAL_BINS


def _features(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    bins = _bins(model)
    if not starts_with_bins(model):
        return numbers(1, FRAMES, bins).to(model.dtype)
    strides = 1
    for child in model.children():
        strides *= child.stride[0] if isinstance(child, nn.Conv1d) else 1
    rows = getattr(model.config, SOURCE_LENGTH, None)
    return numbers(1, bins, FRAMES if rows is None else int(rows) * strides).to(model.dtype)


def _values(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    """A wave, or a spectrogram where the config states its length and its bins."""
    config = model.config
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return numbers(1, int(config.max_length), int(config.num_mel_bins)).to(model.dtype)
    channels = getattr(config, "audio_channels", None)
    shape = (1, SAMPLES) if channels is None else (1, int(channels), SAMPLES)
    return numbers(*shape).to(model.dtype)


def _past_length(model: PreTrainedModel) -> int:
    lags = getattr(model.config, "lags_sequence", None) or [0]
    length = first_int(model.config, ("context_length",), 64) + max(lags)
    # A model of many channels accepts its own length only; others accept any number of patches.
    patch = 0 if hasattr(model.config, "num_input_channels") else first_int(model.config, ("patch_length",), 0)
    return max(length, _PATCHES * patch)


def _past_values(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    channels = getattr(model.config, "num_input_channels", None)
    shape = (1, _past_length(model)) if channels is None else (1, _past_length(model), int(channels))
    return numbers(*shape).to(model.dtype)


def _patches(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    config = model.config
    count = (max(config.context_length, config.patch_length) - config.patch_length) // config.patch_stride + 1
    return numbers(1, config.num_input_channels, count, config.patch_length).to(model.dtype)


def _mask_of_frames(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    features = given["input_features"]
    return torch.ones(1, features.shape[-1 if starts_with_bins(model) else 1], dtype=torch.int64)


_RULES: dict[str, Callable[[PreTrainedModel, dict[str, Any]], Tensor | None]] = {
    "input_features": _features,
    "input_values": _values,
    "audio_mel": _features,
    "hidden_states": lambda model, given: numbers(1, FRAMES, int(model.config.input_size)).to(model.dtype),
    "latents": lambda model, given: numbers(1, first_int(model.config, WIDTHS), _PATCHES).to(model.dtype),
    "past_values": _past_values,
    "patch_input": _patches,
    "input_features_mask": _mask_of_frames,
    "audio_mel_mask": lambda model, given: torch.zeros(1, given["audio_mel"].shape[1], dtype=torch.bool),
    "past_values_padding": lambda model, given: torch.zeros_like(given["past_values"]),
    "past_observed_mask": lambda model, given: torch.ones_like(given["past_values"]),
    "mask": lambda model, given: torch.ones(1, FRAMES, dtype=torch.int64),
    "freq": lambda model, given: torch.zeros(1, 1, dtype=torch.int64),
}


def _time_axes(given: dict[str, Any], model: PreTrainedModel) -> dict[str, int]:
    """The axis of time of every argument that holds numbers."""
    axes = dict.fromkeys(("audio_mel", "past_values", "hidden_states"), 1)
    axes["latents"] = 2
    axes["patch_input"] = 2
    axes["input_features"] = 2 if starts_with_bins(model) else 1
    values = given.get("input_values")
    axes["input_values"] = 1 if values is None or values.dim() == 2 or values.shape[1] > values.shape[2] else 2
    return axes


def _periodic(value: Tensor, axis: int | None, period: int) -> Tensor:
    """The series in which the first `period` frames are repeated."""
    if axis is None:
        return value
    frames = torch.arange(value.shape[axis], device=value.device) % period
    return value.index_select(axis, frames)
