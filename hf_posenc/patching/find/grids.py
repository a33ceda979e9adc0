"""The grid of a stack whose input is pixels: its patch projection, its tables, and the biases of its attention."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from hf_posenc.patching.find.model_parts import reads_spectrogram
from hf_posenc.patching.find.tables import OwnedTable

_TABLE = re.compile(
    r"^(absolute_|decoder_)?pos(ition(al)?)?_(embed(ding)?s?|encodings?)(_vlm|_table|_window)?$"
    r"|^time_(position_)?embeddings$|^mid_position_embeddings$"
)
#: - "module": a module whose output is the bias (Swin, BEiT).
#: - "table": a parameter of the attention module, which looks it up itself (Donut, MaskFormer).
#: - "network": a network of the displacement (Swin v2).
#: - "flag": an attribute that turns the bias on (SAM's decomposed table, ViTDet).
#: - "rotation": a method of the attention module that rotates one tensor at a time (V-JEPA 2).
BiasKind = Literal["module", "table", "network", "flag", "rotation"]

#: The method with which a module reads a table `(1, hidden, rows, columns)`.
_READS_CHANNELS_FIRST = "_get_pos_embed"
#: Rows of a table for class tokens and registers, at most.
_MOST_PREFIX_ROWS = 16
_BIAS_TABLE = "relative_position_bias_table"
_ATTRIBUTES: dict[str, BiasKind] = {
    _BIAS_TABLE: "table",
    "continuous_position_bias_mlp": "network",
    "use_rel_pos": "flag",
    "use_relative_position_embeddings": "flag",
    "apply_rotary_embeddings": "rotation",
}
_NAMES: dict[BiasKind, str] = {
    "module": "bias table over displacements",
    "table": "bias table over displacements",
    "network": "bias network of displacements",
    "flag": "decomposed bias tables",
    "rotation": "rotation",
}


@dataclass
class FoundBias:
    """One native mechanism in the attention of a grid.

    Args:
        path: path of the module below the stack.
        module: the module.
        name: the attribute that holds the mechanism; empty for the module itself.
        kind: how it is disabled.
    """

    path: str
    module: Any
    name: str
    kind: BiasKind

    @property
    def table(self) -> Tensor | None:
        """The `(displacements, heads)` table of the bias; `None` for other mechanisms."""
        found = getattr(self.module, _BIAS_TABLE, None)
        return found if self.kind in ("module", "table") and isinstance(found, Tensor) else None

    @property
    def window(self) -> tuple[int, int] | None:
        """The sizes of the window that the table is for."""
        size = getattr(self.module, "window_size", None)
        if isinstance(size, int):
            return size, size
        return (int(size[0]), int(size[1])) if isinstance(size, tuple | list) else None

    def acts_on(self, attention_path: str) -> bool:
        """Whether the bias is that of an attention module: inside it, beside it, or above it."""
        owner = self.path.rpartition(".")[0] if self.kind == "module" else self.path
        return not owner or f"{attention_path}.".startswith(f"{owner}.") or self.path.startswith(f"{attention_path}.")

    def __str__(self) -> str:
        return f"{self.path}: {_NAMES[self.kind]}"


@dataclass
class FoundGrid:
    """What discovery knows about the grid of a stack.

    Args:
        projection: the convolution whose output has a place per patch; `None` if there is none.
        native: sizes of the grid for an image of the size in the config, or `None` if it is unknown.
        tables: the position tables over the grid.
        suffix_tokens: number of tokens without a place that follow the patches.
        biases: native mechanisms in its attention layers.
    """

    projection: Any = None
    native: tuple[int, ...] | None = None
    tables: list[OwnedTable] = field(default_factory=list)
    suffix_tokens: int = 0
    biases: list[FoundBias] = field(default_factory=list)

    def sites(self) -> list[OwnedTable]:
        """One table of every module whose forward an additive scheme replaces."""
        return list({id(table.module): table for table in self.tables}.values())


def find_grid(modules: Iterable[tuple[str, nn.Module]], config: Any, suffix_tokens: int = 0) -> FoundGrid:
    """Finds the patch projection and the tables.

    Args:
        modules: path and module of the stack itself, and of all modules that belong to it, in the order of definition.
        config: the config of the stack.
        suffix_tokens: as in `FoundGrid`.
    """
    own = list(modules)
    projection: Any = next((module for _, module in own if _is_projection(module, config)), None)
    grid = FoundGrid(projection, _native_sizes(projection, config), suffix_tokens=suffix_tokens)
    others = 0 if grid.native is None else math.prod(grid.native) + suffix_tokens
    for path, module in own:
        grid.tables.extend(_tables_of(path, module, others))
    grid.biases = find_biases(own)
    return grid


def find_biases(modules: Iterable[tuple[str, nn.Module]]) -> list[FoundBias]:
    """The native mechanisms of modules, by path."""
    found = []
    for path, module in modules:
        if type(module).__name__.endswith("RelativePositionBias"):
            found.append(FoundBias(path, module, "", "module"))
            continue
        for name, kind in _ATTRIBUTES.items():
            # A flag of a module without parameters of its own only repeats a setting.
            repeats = kind == "flag" and not any("rel_pos" in own for own in module._parameters)
            value = getattr(module, name, None)
            if value is not None and value is not False and not repeats:
                found.append(FoundBias(path, module, name, kind))
    return found


def window_of(attention: nn.Module, config: Any) -> tuple[int, ...] | None:
    """Sizes of the windows that an attention module states.

    The module of a bias states the sizes of its table. In a model without windows, they are not those of a window.
    """
    for module in attention.modules():
        if hasattr(module, _BIAS_TABLE) and not hasattr(config, "window_size"):
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


def _tables_of(path: str, module: nn.Module, others: int) -> list[OwnedTable]:
    """The tables of a module; `others` is the number of rows of patches and of tokens after them, if it is known."""
    found = []
    for name in [*module._parameters, *module._buffers, *module._modules, *module.__dict__]:
        value = getattr(module, name, None)
        if not _TABLE.match(name):
            continue
        if isinstance(value, nn.Embedding) or (isinstance(value, Tensor) and value.dim() in (2, 3, 4)):
            table = OwnedTable(path, module, name, 0, hasattr(module, _READS_CHANNELS_FIRST))
            rows = table.weight.shape[0]
            more = max(rows - others, 0) if others else 0
            table.prefix_rows = more if more <= _MOST_PREFIX_ROWS else _rows_before_square(rows)
            found.append(table)
    return found


def _rows_before_square(rows: int) -> int:
    """The rows before the patches in a table for another grid than that of the config, which is a square."""
    return next((more for more in range(_MOST_PREFIX_ROWS) if math.isqrt(rows - more) ** 2 == rows - more), 0)
