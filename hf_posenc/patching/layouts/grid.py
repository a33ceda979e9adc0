"""Patches of images and videos, or of a spectrogram: their places have rows and columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack, reads_frames
from hf_posenc.patching.anatomy.architectures.example_inputs import numbers, sides
from hf_posenc.patching.anatomy.discovery import first_int
from hf_posenc.patching.anatomy.native_scheme import Rotation
from hf_posenc.patching.anatomy.short_runs import unknown_inputs
from hf_posenc.patching.anatomy.sites import AttentionLayer, OwnedTable
from hf_posenc.patching.anatomy.weights import shape_of
from hf_posenc.patching.call.grid_state import GridState, grid_state
from hf_posenc.patching.forwards import forward_parameters, named_arguments
from hf_posenc.patching.layouts.grid_native import BIAS_TABLE, GridBias, find_biases, native_grid_scheme
from hf_posenc.patching.layouts.grid_sites import (
    GridTableSite,
    ProjectionSite,
    refuses_other_sizes,
)
from hf_posenc.patching.layouts.layout import Layout
from hf_posenc.schemes.parts import AdditiveEncoding, LogitScale, Part, QueryKeyMap

if TYPE_CHECKING:
    from hf_posenc.patching.place.transaction import Transaction

_TABLE = re.compile(
    r"^(absolute_|decoder_)?pos(ition(al)?)?_(embed(ding)?s?|encodings?)(_vlm|_table|_window)?$"
    r"|^time_(position_)?embeddings$|^mid_position_embeddings$"
)
#: Modalities whose tokens are patches.
_PIXELS = frozenset({"image", "video"})
#: The method with which a module reads a table `(1, hidden, rows, columns)`.
_READS_CHANNELS_FIRST = "_get_pos_embed"
#: Maximum number of rows of a table for class tokens and registers.
_MOST_PREFIX_ROWS = 16
#: If an image has fewer patches, all of them may be at its edges.
_FEWEST_PATCHES = 16
#: Config attributes for the number of channels of an image.
_CHANNELS = ("num_channels", "in_channels", "in_chans", "patch_embed_input_channels")
#: Pixels of a side if the config does not state the size of its images.
_SIDE = 64
#: The advice about schemes that number patches row by row, for messages.
TWO_DIMENSIONAL = (
    "For rows and columns use 'rope_nd', 'swin', axes=2 (sinusoidal, alibi, t5, log_cpb), or grid=(rows, columns) "
    "(learned); for videos axes=3 or a grid of three sizes."
)


@dataclass
class Grid(Layout):
    """Patches.

    Args:
        projection: the convolution whose output has a place per patch; `None` if there is none.
        step: sizes of a patch in pixels, or `None` if they are unknown.
        native: sizes of the grid for an image of the size in the config, or `None` if it is unknown.
        tables: the position tables over the grid.
        suffix_tokens: number of tokens without a place that follow the patches.
        biases: native mechanisms in its attention layers.
    """

    has_axes = True
    token_axes = (2, 3, 4)

    projection: Any = None
    step: tuple[int, ...] | None = None
    native: tuple[int, ...] | None = None
    tables: list[OwnedTable] = field(default_factory=list)
    suffix_tokens: int = 0
    biases: list[GridBias] = field(default_factory=list)

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Whether a model reads images or videos only, cuts a spectrogram into patches, or has windows on a grid."""
        windowed = any(BIAS_TABLE in part._parameters for part in module.modules())
        return _reads_pixels(module) or _reads_spectrogram(module.config) or windowed

    @classmethod
    def find(cls, stack: Stack) -> Layout:
        """Finds the projection, the tables and the biases."""
        modules, config, suffix_tokens = stack.in_definition_order(), stack.config, stack.architecture.suffix_tokens
        suffix_tokens = suffix_tokens(config) if callable(suffix_tokens) else suffix_tokens
        convolutions = (module for _, module in modules if isinstance(module, nn.Conv2d | nn.Conv3d))
        of_pixels = (module for module in convolutions if module.in_channels == _channels(config))
        # It reduces their number.
        projection: Any = next((module for module in of_pixels if module.stride[-1] > 1), None)
        steps = getattr(config, "patch_size", None) if projection is None else projection.stride
        step = sides(steps) if isinstance(steps, int) else steps
        grid = cls(projection, step, _native_sizes(projection, step, stack.module), suffix_tokens=suffix_tokens)
        others = 0 if grid.native is None else math.prod(grid.native) + suffix_tokens
        for path, module in modules:
            grid.tables.extend(_tables_of(path, module, others))
        grid.biases = find_biases(modules)
        return grid

    @classmethod
    def includes(cls, child: PreTrainedModel, stack: nn.Module) -> bool:
        """Many vision models keep their layers in an encoder that is a `PreTrainedModel`, but receives patches."""
        return _pixel_argument(child) is None

    @classmethod
    def is_causal(cls, attention: nn.Module) -> bool | None:
        """Whether the module has `is_causal=True`."""
        return getattr(attention, "is_causal", None) is True

    @classmethod
    def window_of(cls, attention: nn.Module, config: Any) -> tuple[int, ...] | None:
        """Sizes of the windows of patches that an attention module states, `(rows, columns)`.

        The module of a bias states the sizes of its table. In a model without windows, these are not window sizes.
        """
        for module in attention.modules():
            if hasattr(module, BIAS_TABLE) and not hasattr(config, "window_size"):
                continue
            size = getattr(module, "window_size", None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                return (size, size)
            if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) for side in size):
                return tuple(size)
        return None

    @classmethod
    def example(cls, module: PreTrainedModel, length: int) -> dict[str, Any]:
        """One image, one video or one spectrogram of the size in the config."""
        if _reads_spectrogram(module.config):
            return {"input_values": numbers(1, int(module.config.max_length), int(module.config.num_mel_bins))}
        return _pixels(module)

    def native_bias(self, stack: Stack, attention: AttentionLayer) -> Tensor | None:
        """The table of the bias that acts on a layer."""
        return next((bias.table for bias in self.biases if bias.acts_on(attention.path)), None)

    def described(self, stack: Stack) -> tuple[list[str], list[str]]:
        """A line for each table, and for each kind of mechanism, with the place of the first."""
        tables = []
        for table in self.tables:
            rows, columns = table.weight.shape
            start = f", first patch in row {table.prefix_rows}" if table.prefix_rows else ""
            size = f"{rows} x {columns}, over the patches{start}"
            tables.append(f"{table.full_name} ({type(table.module).__name__}): {size}")
        kinds: dict[str, list[GridBias]] = {}
        for bias in self.biases:
            kinds.setdefault(bias.kind, []).append(bias)
        more = [f", and {len(alike) - 1} more" if len(alike) > 1 else "" for alike in kinds.values()]
        return tables, [f"{alike[0]}{others}" for alike, others in zip(kinds.values(), more, strict=True)]

    def stated_length(self) -> str | None:
        """The size of the input; with the number of patches for an image of the size in the config."""
        start = "follows from the size of the input"
        if self.native is None:
            return start
        return f"{start}; {' x '.join(map(str, self.native))} patches at the image size in the config"

    def runs_alone(self, stack: Stack, model: nn.Module) -> bool:
        """Whether the stack is inside a larger model, with a head or a decoder."""
        return stack.module is not model

    def is_comparable(self, stack: Stack, tokens: Tensor | None) -> bool:
        """Whether there are patches away from the edges. Patches from another stack contain its positions."""
        return self.projection is not None and tokens is not None and tokens.shape[1] >= _FEWEST_PATCHES

    def native_scheme(self, stack: Stack, rotations: Mapping[str, Rotation], trial: Transaction) -> Any:
        """The scheme of its tables, its biases and its rotations."""
        return native_grid_scheme(stack, self, rotations, trial)

    def in_raster_order(self, parts: Iterable[Part]) -> list[str]:
        """The effects of the parts that read positions but not rows and columns."""
        reading = [part for part in parts if getattr(part, "reads_positions", True)]
        placed = [part for part in reading if any(getattr(each, "reads_coordinates", False) for each in part.modules())]
        return sorted({_effect(part) for part in reading if part not in placed})

    def state_of_call(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GridState:
        """The grid of a call, as far as its arguments show it."""
        given = named_arguments(stack, args, kwargs)
        state = grid_state(stack, self.suffix_tokens, given)
        if self.projection is None and self.native is not None and not state.is_known:
            # As many cut patches as an image of the size in the config has, `(batch, patches, values)`.
            tensors = (value for value in given.values() if isinstance(value, Tensor) and value.dim() == 3)
            if any(value.shape[1] == math.prod(self.native) for value in tensors):
                state.grid = self.native
        return state

    def native_vectors(self, stack: Stack, additive: AdditiveEncoding) -> tuple[Tensor, str] | None:
        """The first table; for a part that reads coordinates, with the rows of other tokens first."""
        if not self.tables or not additive.reads_coordinates:
            return super().native_vectors(stack, additive)
        table = self.tables[0]
        return table.in_order_of_tokens(table.prefix_rows + self.suffix_tokens), table.full_name

    def install(self, stack: Stack, encoding: Any, journal: Any, report: Any) -> None:
        """Records the grid of every call, and puts the vectors of the scheme in place of the tables over the grid."""
        runtime = encoding.runtime
        self._install_projection(stack, runtime, journal)
        for first in self.vector_sites(stack):
            site = GridTableSite(first.module, self.tables, runtime, encoding.additive)
            if first.module is stack.module:
                runtime.viewed = site
            else:
                journal.set_forward(first.module, site)
        for table in self.tables:
            journal.freeze(table.module, table.name)
            report.replaced.append(f"{table.full_name}: position table ({type(table.module).__name__})")
        in_order = self.in_raster_order(encoding.acting_parts())
        if in_order:
            report.positions = f"patches are numbered row by row for {' and '.join(in_order)}. {TWO_DIMENSIONAL}"
        elif next(encoding.acting_parts(), None) is not None:
            report.positions = "rows and columns of patches"
        modules = () if stack.first_layer is None else stack.first_layer.modules()
        if any(isinstance(module, nn.Conv2d) and module.kernel_size[-1] > 1 for module in modules):
            report.kept.append("convolutions between its layers read neighbouring patches")
        for bias in self.biases:
            bias.silence(journal)
            report.replaced.append(str(bias))
        if encoding.additive is not None and self.tables:
            if len(self.tables) > 1 and isinstance(self.projection, nn.Conv3d):
                names = " and ".join(table.full_name for table in self.tables)
                raise UnsupportedError(
                    f"{type(stack.module).__name__} numbers the patches of a frame and the frames in separate tables "
                    f"({names}), so the vectors of a scheme cannot replace them. Use a scheme that acts inside "
                    "attention."
                )
            report.placed.append(f"additive: {self.tables[0].full_name}")

    def _install_projection(self, stack: Stack, runtime: Any, journal: Any) -> None:
        if self.projection is None:
            return
        journal.set_forward(self.projection, ProjectionSite(self.projection, runtime))
        owners = {id(stack.module), *(id(table.module) for table in self.tables)}
        for module in stack.module.modules():
            inside = any(child is self.projection for child in module.children())
            if inside and id(module) not in owners and refuses_other_sizes(module):
                journal.set_forward(module, GridTableSite(module, self.tables, runtime, None))


def _effect(part: nn.Module) -> str:
    if isinstance(part, AdditiveEncoding):
        return "the added vectors"
    if isinstance(part, QueryKeyMap):
        return "the rotation"
    return "the logit scale" if isinstance(part, LogitScale) else "the bias"


def _reads_pixels(model: Any) -> bool:
    """Whether the only input of a `PreTrainedModel` is images or videos, so that its tokens are patches on a grid."""
    if any(name.endswith("input_ids") for name in forward_parameters(type(model))) or reads_frames(model):
        return False  # The text part of a model may inherit the modalities of the whole.
    modalities = model.input_modalities
    stated = {modalities} if isinstance(modalities, str) else set(modalities)
    return stated <= _PIXELS or _pixel_argument(model) is not None


def _reads_spectrogram(config: Any) -> bool:
    """Whether a model cuts a spectrogram into patches, so that frequencies are rows and times are columns (AST)."""
    return all(hasattr(config, name) for name in ("num_mel_bins", "max_length", "frequency_stride", "time_stride"))


def _pixel_argument(model: Any) -> str | None:
    """The argument that holds images, videos, or patches and the sizes of their grids."""
    names = list(forward_parameters(type(model)))
    packed = any(name in names for name in ("grid_thw", "spatial_shapes", "image_grid_thw"))
    return next((name for name in names if name.startswith("pixel_values")), names[1] if packed else None)


def _channels(config: Any) -> int:
    return 1 if _reads_spectrogram(config) else first_int(config, _CHANNELS, 3)


def _native_sizes(projection: Any, step: tuple[int, ...] | None, model: Any) -> tuple[int, ...] | None:
    config = model.config
    if _reads_spectrogram(config):
        sizes = ((config.num_mel_bins, config.frequency_stride), (config.max_length, config.time_stride))
        return tuple((size - config.patch_size) // stride + 1 for size, stride in sizes)
    sides, frames = _sides(model), _frames(config)
    of_video = isinstance(projection, nn.Conv3d)
    if sides is None or step is None or (of_video and frames is None):
        return None
    pixels = (frames, *sides) if of_video and frames is not None else sides
    return tuple(count // size for count, size in zip(pixels, tuple(step)[-len(pixels) :], strict=True))


def _sides(model: Any) -> tuple[int, int] | None:
    """Height and width of an image in pixels, if the config states them, or a module that cuts patches (timm)."""
    size = getattr(model.config, "image_size", None) or getattr(model.config, "crop_size", None)
    size = size or next((part.img_size for part in model.modules() if getattr(part, "img_size", None)), None)
    stated = isinstance(size, int) or (isinstance(size, list | tuple) and len(size) >= 2)
    return sides(size) if stated else None


def _frames(config: Any) -> int | None:
    """Number of frames of a video, if the config states it."""
    return first_int(config, ("num_frames", "frames_per_clip")) or None


def _tables_of(path: str, module: nn.Module, others: int) -> list[OwnedTable]:
    """The tables of a module; `others` is the number of rows of patches and of tokens after them, if it is known."""
    tables = []
    for name in [*module._parameters, *module._buffers, *module._modules, *module.__dict__]:
        value = getattr(module, name, None)
        if not _TABLE.match(name):
            continue
        axes = len(shape_of(value)) if isinstance(value, Tensor) else 0
        if isinstance(value, nn.Embedding) or axes in (2, 3, 4):
            is_map = hasattr(module, _READS_CHANNELS_FIRST) and axes == 4
            table = OwnedTable(path, module, name, 0, is_map)
            rows = table.weight.shape[0]
            more = max(rows - others, 0) if others else 0
            table.prefix_rows = more if more <= _MOST_PREFIX_ROWS else _rows_before_square(rows)
            tables.append(table)
    return tables


def _rows_before_square(rows: int) -> int:
    """The rows before the patches in a table whose grid is a square, and not the grid of the config."""
    return next((more for more in range(_MOST_PREFIX_ROWS) if math.isqrt(rows - more) ** 2 == rows - more), 0)


def _pixels(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments of a model for one image, or one video, of the size in its config.

    The values are fixed, so that the caller's random generator is not used.
    """
    config = model.config
    names = forward_parameters(type(model))
    if "grid_thw" in names:
        return _packed(model)
    pixels, channels, frames = _sides(model) or (_SIDE, _SIDE), _channels(config), _frames(config)
    shape = (1, channels, *pixels) if frames is None else (1, frames, channels, *pixels)
    given = {_name(model): numbers(*shape)}
    if "patch_attention_mask" in names:
        rows, columns = (side // step for side, step in zip(pixels, _patch_size(config), strict=True))
        given["patch_attention_mask"] = torch.ones(1, rows, columns, dtype=torch.bool)
    if "spatial_shapes" in names:
        given[_name(model)] = numbers(1, 4, channels * math.prod(_patch_size(config)))
        given["spatial_shapes"] = torch.tensor([[2, 2]])
        given["pixel_attention_mask"] = torch.ones(1, 4, dtype=torch.int64)
    return given


def _packed(model: PreTrainedModel) -> dict[str, Any]:
    """Patches of one image, already cut out."""
    config = model.config
    merge = int(getattr(config, "spatial_merge_size", 1))
    frames = int(getattr(config, "temporal_patch_size", 1))
    values = numbers(4 * merge * merge, _channels(config) * frames * math.prod(_patch_size(config)))
    given = {_name(model): values, "grid_thw": torch.tensor([[1, 2 * merge, 2 * merge]])}
    if "merge_sizes" in forward_parameters(type(model)):
        given["merge_sizes"] = torch.tensor([merge])
    return given


def _patch_size(config: Any) -> tuple[int, int]:
    """Rows and columns of a patch, in pixels."""
    return sides(getattr(config, "patch_size", 16))


def _name(model: PreTrainedModel) -> str:
    name = _pixel_argument(model)
    if name is None:
        raise unknown_inputs(model, "takes images in an unknown form, with patches in unknown places")
    return name
