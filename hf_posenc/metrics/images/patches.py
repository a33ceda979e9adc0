"""The patches of an image model, and its outputs for them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.preserve import evaluation_mode


@dataclass(frozen=True)
class PatchSize:
    """Height and width of the patches of a model in pixels, and the number of channels of its images."""

    height: int
    width: int
    channels: int

    @classmethod
    def of(cls, model: Any) -> PatchSize:
        """Reads the patch size from the projection of the patches.

        Raises:
            UnsupportedError: if the model does not run on `pixel_values` alone, or has no such projection.
        """
        inner = unwrapped(model)
        if not _reads_images_alone(inner):
            raise UnsupportedError(
                f"{type(inner).__name__} is not a pure image model, which reads only `pixel_values` of shape (batch, "
                f"channels, height, width). {_remedy(inner)}"
            )
        for module in inner.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.kernel_size != (1, 1):
                return cls(int(module.kernel_size[0]), int(module.kernel_size[1]), module.in_channels)
        raise UnsupportedError(
            f"{type(inner).__name__} has no projection of patches (a Conv2d whose stride is its kernel size), so its "
            "patches cannot be placed in an image."
        )

    def pixels(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns height and width of an image of `rows` x `columns` patches."""
        return rows * self.height, columns * self.width


def _reads_images_alone(module: nn.Module) -> bool:
    """Whether the forward of a module runs on `pixel_values` alone and has no argument for token ids."""
    accepted = inspect.signature(module.forward).parameters
    named = [argument for argument in accepted.values() if not argument.kind.name.startswith("VAR_")]
    required = {argument.name for argument in named if argument.default is argument.empty}
    return "pixel_values" in accepted and "input_ids" not in accepted and required <= {"pixel_values"}


def _remedy(model: PreTrainedModel) -> str:
    """Returns what to measure instead of a model that does not read only images."""
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and _reads_images_alone(module):
            return (
                f"In Python, pass its part model.{name}. For the command line, save this part of the stock model as a "
                f"separate model: model.{name}.save_pretrained(folder)."
            )
    instead = "Measure a model such as ViT, DINOv2 or the vision tower of CLIP."
    if "input_ids" in inspect.signature(model.forward).parameters:
        instead += (
            " No part of this model is a pure image model (some read patches with the sizes of their grids). To "
            "measure its text part, use an evaluation of texts, such as dog and sensitivity."
        )
    return instead


class PatchOutputs(NamedTuple):
    """The outputs of a model for images, on the CPU.

    Args:
        states: `(batch, rows, columns, hidden)` each, the input of the first layer, then the output of every layer.
        whole: the output for an image as a whole, `(batch, width)`: the logits, the pooled output, or the class token;
            `None` if the model has none of these.
    """

    states: tuple[Tensor, ...]
    whole: Tensor | None


def run_images(model: Any, pixel_values: Tensor, **options: Any) -> Any:
    """Runs a model in evaluation mode on `(batch, channels, height, width)` pixels, also of another size.

    Raises:
        UnsupportedError: if the model cannot read images of this size.
    """
    inner = unwrapped(model)
    weight, options = next(inner.parameters()), options | size_options(model)
    try:
        with evaluation_mode(model):
            return model(pixel_values=pixel_values.to(weight.device, weight.dtype), **options)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, UnsupportedError) or not _about_size(model, pixel_values):
            raise
        height, width = pixel_values.shape[-2:]
        raise UnsupportedError(
            f"{type(inner).__name__} cannot read images of {height} x {width} pixels: {error} Choose another "
            "resolution, or a scheme that has no position table."
        ) from error


def size_options(model: Any) -> dict[str, Any]:
    """Returns the argument that asks a model to interpolate its position table to the size of images, if it has one."""
    name = "interpolate_pos_encoding"
    return {name: True} if name in inspect.signature(unwrapped(model).forward).parameters else {}


def _about_size(model: Any, pixel_values: Tensor) -> bool:
    """Whether the images differ in size from those in the config, so that the model may have refused their size."""
    named = getattr(unwrapped(model).config, "image_size", None)
    height, width = (named, named) if isinstance(named, int) else named or (None, None)
    return tuple(pixel_values.shape[-2:]) != (height, width)


def patch_outputs(model: Any, pixel_values: Tensor) -> PatchOutputs:
    """Runs a model on images and arranges its states in the grid of patches.

    Tokens before the patches (class and register tokens) have no place in the image and are omitted.

    Args:
        model: a model that reads only images.
        pixel_values: `(batch, channels, height, width)`.

    Raises:
        UnsupportedError: if the model returns no hidden states, or merges its patches.
    """
    size = PatchSize.of(model)
    rows, columns = pixel_values.shape[-2] // size.height, pixel_values.shape[-1] // size.width
    output = run_images(model, pixel_values, output_hidden_states=True, return_dict=True)
    hidden_states = getattr(output, "hidden_states", None)
    name = type(unwrapped(model)).__name__
    if not hidden_states or hidden_states[0] is None:
        raise UnsupportedError(f"{name} returns no hidden states, but this measurement needs them.")
    states = []
    for layer, state in enumerate(hidden_states):
        extra = state.shape[1] - rows * columns if state.dim() == 3 else -1
        if extra < 0:
            raise UnsupportedError(
                f"{name} returns states of shape {tuple(state.shape)} after layer {layer} for {rows} x {columns} "
                "patches: it merges patches, so the states of one patch cannot be followed through the layers."
            )
        states.append(state[:, extra:].unflatten(1, (rows, columns)).cpu())
    whole = getattr(output, "logits", None)
    whole = getattr(output, "pooler_output", None) if whole is None else whole
    if whole is None and hidden_states[-1].shape[1] > rows * columns:
        whole = hidden_states[-1][:, 0]
    if whole is not None and whole.dim() != 2:
        whole = None
    return PatchOutputs(tuple(states), None if whole is None else whole.cpu())


def drawn_images(size: PatchSize, count: int, rows: int, columns: int, seed: int) -> Tensor:
    """Draws `(count, channels, height, width)` normal pixels of `rows` x `columns` patches, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size.channels, *size.pixels(rows, columns), generator=generator)


def cut(pixel_values: Tensor, size: PatchSize) -> Tensor:
    """Cuts images `(batch, channels, height, width)` into patches `(batch, rows, columns, channels, patch, patch)`."""
    parts = pixel_values.unfold(2, size.height, size.height).unfold(3, size.width, size.width)
    return parts.permute(0, 2, 3, 1, 4, 5)


def joined_patches(patches: Tensor) -> Tensor:
    """Joins the patches that `cut` returns to images."""
    batch, rows, columns, channels, height, width = patches.shape
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * height, columns * width)
