"""The patch projection and the position tables of a stack whose input is pixels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.find.grids.biases import FoundBias, find_biases
from hf_posenc.patching.find.model_parts import reads_spectrogram
from hf_posenc.patching.find.tables import table_weight

_TABLE = re.compile(
    r"^(absolute_|decoder_)?pos(ition(al)?)?_(embed(ding)?s?|encodings?)(_vlm|_table|_window)?$"
    r"|^time_(position_)?embeddings$|^mid_position_embeddings$"
)


@dataclass
class GridTable:
    """A table with a row per patch: a parameter, a tensor or an embedding that a module adds to its patches.

    Args:
        path: path of the module below the stack; empty for the stack itself.
        module: the module that owns the table and adds it.
        name: attribute that holds the table.
        prefix_rows: number of rows before those of the patches, for class tokens.
    """

    path: str
    module: Any
    name: str
    prefix_rows: int

    @property
    def full_name(self) -> str:
        """Path of the table below the stack."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def value(self) -> Any:
        """The parameter, tensor or embedding that holds the table."""
        return getattr(self.module, self.name)

    @property
    def requires_grad(self) -> bool:
        """Whether the table is trained."""
        return bool(self.weight.requires_grad)

    def in_order_of_tokens(self, others: int) -> Tensor:
        """The table with the rows of all tokens without a place first, `(rows, hidden)`.

        Args:
            others: number of tokens without a place.
        """
        weight, behind = self.weight, others - self.prefix_rows
        if behind <= 0:
            return weight
        return torch.cat([weight[: self.prefix_rows], weight[-behind:], weight[self.prefix_rows : -behind]])

    @property
    def weight(self) -> Tensor:
        """The table, `(rows, hidden)`."""
        return table_rows(getattr(self.module, self.name))


@dataclass
class FoundGrid:
    """What discovery knows about the grid of a stack.

    Args:
        projection_path: path of the patch projection below the stack.
        projection: the convolution whose output has a place per patch; `None` if there is none.
        native: sizes of the grid for an image of the size in the config, or `None` if it is unknown.
        tables: the position tables over the grid.
        suffix_tokens: number of tokens without a place that follow the patches.
        biases: native mechanisms in its attention layers.
    """

    projection_path: str = ""
    projection: Any = None
    native: tuple[int, ...] | None = None
    tables: list[GridTable] = field(default_factory=list)
    suffix_tokens: int = 0
    biases: list[FoundBias] = field(default_factory=list)

    @property
    def native_patches(self) -> int:
        """Number of patches of an image of the size in the config; 0 if it is unknown."""
        return 0 if self.native is None else math.prod(self.native)

    def sites(self) -> list[GridTable]:
        """One table of every module whose forward an additive scheme replaces."""
        return list({id(table.module): table for table in self.tables}.values())


def table_rows(value: Any) -> Tensor:
    """The `(rows, hidden)` tensor of a table."""
    weight = table_weight(value) if isinstance(value, nn.Module) else value
    assert isinstance(weight, Tensor)
    return weight.reshape(-1, weight.shape[-1])


def find_grid(modules: Iterable[tuple[str, nn.Module]], config: Any, suffix_tokens: int = 0) -> FoundGrid:
    """Finds the patch projection and the tables.

    Args:
        modules: path and module of the stack itself, and of all modules that belong to it, in the order of definition.
        config: the config of the stack.
        suffix_tokens: as in `FoundGrid`.
    """
    grid = FoundGrid(suffix_tokens=suffix_tokens)
    own = list(modules)
    for path, module in own:
        if _is_projection(module, config):
            grid.projection_path, grid.projection = path, module
            break
    grid.native = _native_sizes(grid.projection, config)
    others = 0 if grid.native is None else math.prod(grid.native) + suffix_tokens
    for path, module in own:
        grid.tables.extend(_tables_of(path, module, others))
    grid.biases = find_biases(own)
    return grid


def window_of(attention: nn.Module, config: Any) -> tuple[int, ...] | None:
    """Sizes of the windows that an attention module states.

    The module of a bias states the sizes of its table. In a model without windows, they are not those of a window.
    """
    for module in attention.modules():
        if hasattr(module, "relative_position_bias_table") and not hasattr(config, "window_size"):
            continue
        size = getattr(module, "window_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return (size, size)
        if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(one, int) for one in size):
            return tuple(size)
    return None


def _is_projection(module: nn.Module, config: Any) -> bool:
    """Whether a module is a convolution of pixels that makes them fewer."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or module.stride[-1] == 1:
        return False
    return module.in_channels == _channels(config)


def _channels(config: Any) -> int:
    if reads_spectrogram(config):
        return 1
    names = ("num_channels", "in_channels", "in_chans")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 3)


def _native_sizes(projection: nn.Conv2d | nn.Conv3d | None, config: Any) -> tuple[int, ...] | None:
    if reads_spectrogram(config):
        sizes = ((config.num_mel_bins, config.frequency_stride), (config.max_length, config.time_stride))
        return tuple((size - config.patch_size) // stride + 1 for size, stride in sizes)
    size = getattr(config, "image_size", None)
    if size is None:
        size = getattr(config, "crop_size", None)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, list | tuple) or len(size) < 2:
        return None
    pixels = [int(one) for one in size[-2:]]
    if isinstance(projection, nn.Conv3d):
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
        if not isinstance(frames, int):
            return None
        pixels = [frames, *pixels]
    steps = getattr(config, "patch_size", None) if projection is None else projection.stride
    steps = (steps, steps) if isinstance(steps, int) else steps
    if steps is None:
        return None
    return tuple(one // step for one, step in zip(pixels, tuple(steps)[-len(pixels) :], strict=True))


def _tables_of(path: str, module: nn.Module, others: int) -> list[GridTable]:
    """The tables of a module; `others` is the number of rows of patches and of tokens after them, if it is known."""
    found = []
    for name in [*module._parameters, *module._buffers, *module._modules, *module.__dict__]:
        value = getattr(module, name, None)
        if not _TABLE.match(name):
            continue
        if isinstance(value, nn.Embedding) or (isinstance(value, Tensor) and value.dim() in (2, 3, 4)):
            rows = table_rows(value).shape[0]
            found.append(GridTable(path, module, name, max(rows - others, 0) if others else 0))
    return found
