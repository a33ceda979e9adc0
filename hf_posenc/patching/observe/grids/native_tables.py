"""The native scheme of position tables over a grid of patches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.call.grid_places import in_raster
from hf_posenc.patching.find.forward_code import names_used
from hf_posenc.patching.find.grids.found import FoundGrid, GridTable
from hf_posenc.schemes import LearnedConfig, SinusoidalConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig

_INTERPOLATION = "interpolate_pos_encoding"
#: How architectures whose method cannot be called with an image size resize their tables: the method's name and the
#: options.
_RESIZED_BY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resize_positional_embeddings", {"interpolation": "bilinear", "antialias": True}),
    ("_resize_pos_embed", {"interpolation": "bilinear"}),
)
#: Functions with which a module finds the nearest row of its table for each patch.
_NEAREST = frozenset(("bucketize", "get_vision_nearest_position_ids"))
#: Attributes of modules that resize their tables with a function of `transformers.vision_utils`.
_MODE, _ALIGN_CORNERS, _PADDING = "interpolation_mode", "interpolation_align_corners", "interpolation_padding"


def grid_table_scheme(table: GridTable, grid: FoundGrid) -> SchemeConfig:
    """The scheme that has the same vectors as a table, at all resolutions.

    Raises:
        UnsupportedError: if the table has no row for each patch of a grid.
    """
    weight = table.weight.detach()
    frozen = not weight.is_meta and not (isinstance(table.value, nn.Module | nn.Parameter) and table.requires_grad)
    places = _places(table, grid)
    if frozen:
        for config in _formulas(len(places)):
            if _reproduces(config, weight.float(), table, places, grid.suffix_tokens):
                return config
    others = weight.shape[0] - math.prod(places)
    if others < 0:
        raise UnsupportedError(
            f"The position table {table.full_name} has {weight.shape[0]} rows, fewer than the patches of a grid of "
            f"{places}, so its native scheme cannot be described. Any scheme can replace it."
        )
    learned = LearnedConfig(grid=places, num_prefix_tokens=others)
    return learned if weight.is_meta else _resized_alike(learned, table, grid)


def _places(table: GridTable, grid: FoundGrid) -> tuple[int, ...]:
    """The sizes of the grid that a table is for: that of the config, or else a square."""
    rows = table.weight.shape[0]
    if grid.native is not None:
        return grid.native
    side = math.isqrt(rows)
    if side * side != rows:
        raise UnsupportedError(
            f"The position table {table.full_name} has {rows} rows, which are no square grid, and the config states no "
            "image size, so its native scheme cannot be described. Any scheme can replace it."
        )
    return side, side


def _formulas(axes: int) -> list[SinusoidalConfig]:
    """The formulas of tables that are not trained: VideoMAE's counts patches, MAE's has rows and columns."""
    found = [SinusoidalConfig(layout=layout) for layout in ("interleaved", "concatenated")]
    for layout, columns_first in itertools.product(("concatenated", "interleaved"), (True, False)):
        found.append(SinusoidalConfig(layout=layout, axes=axes, columns_first=columns_first))
    return found


def _reproduces(
    config: SchemeConfig, rows: Tensor, table: GridTable, places: tuple[int, ...], suffix_tokens: int
) -> bool:
    width = rows.shape[1]
    try:
        additive = config.build(BuildContext(hidden_size=width, num_heads=1, head_dim=width)).additive
    except (ValueError, PositionEncodingError):
        return False
    assert additive is not None
    expected = additive(in_raster(places, rows.shape[0], suffix_tokens, rows.device))[0]
    return expected.shape == rows.shape and torch.allclose(expected.float(), rows, atol=1e-4)


def _resized_alike(learned: LearnedConfig, table: GridTable, grid: FoundGrid) -> LearnedConfig:
    """The config with the options with which the architecture resizes the table, determined with its own method."""
    if hasattr(table.module, _MODE):
        if getattr(table.module, _PADDING, "border") != "border":
            raise UnsupportedError(
                f"The position table {table.full_name} is resized with zeros around it, which no scheme of this "
                "library does. Any scheme can replace it, and unpatch_model restores it."
            )
        mode, align_corners = (getattr(table.module, name) for name in (_MODE, _ALIGN_CORNERS))
        return dataclasses.replace(learned, interpolation=mode, align_corners=align_corners)
    if _NEAREST & names_used(type(table.module).forward):
        return dataclasses.replace(learned, interpolation="nearest")
    for name, options in _RESIZED_BY:
        if hasattr(table.module, name):
            return dataclasses.replace(learned, **options)
    if not hasattr(table.module, _INTERPOLATION) or grid.projection is None or len(learned.grid or ()) != 2:
        return learned
    assert learned.grid is not None
    larger = (learned.grid[0] + 1, learned.grid[1] + 2)
    pixels = [size * step for size, step in zip(larger, grid.projection.stride, strict=True)]
    rows = table.weight
    patches = rows.new_zeros(1, table.prefix_rows + math.prod(larger), rows.shape[1])
    try:
        with torch.no_grad():
            expected = getattr(table.module, _INTERPOLATION)(patches, *pixels)
    except (RuntimeError, TypeError, ValueError):
        return learned
    context = BuildContext(hidden_size=rows.shape[1], num_heads=1, head_dim=rows.shape[1])
    for options in ({}, {"antialias": True}, {"interpolation": "bilinear"}, {"align_corners": True}):
        config = dataclasses.replace(learned, **options)
        additive = config.build(context).additive
        assert additive is not None
        additive.adopt(table.in_order_of_tokens(learned.num_prefix_tokens).float())
        with torch.no_grad():
            found = additive(in_raster(larger, expected.shape[1], grid.suffix_tokens, torch.device("cpu")))
        if found.shape == expected.shape and torch.allclose(found, expected.float().cpu(), atol=1e-4):
            return config
    return learned
