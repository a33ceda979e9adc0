"""Tables over a grid, resized to the grids of a call as `interpolate_pos_encoding` of transformers does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.schemes.grids import Places
from hf_posenc.schemes.positions import Positions, integers_on

#: "none" refuses grids that are larger than the table.
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "none")


@dataclass(frozen=True)
class Resizing:
    """How a table is resized.

    Args:
        interpolation: one of `INTERPOLATIONS`.
        antialias: whether a smaller table is smoothed, as in SigLIP 2 and DINOv2 with registers.
        align_corners: whether the corners of both grids coincide instead of their outer edges, as in Qwen3-VL.
    """

    interpolation: str
    antialias: bool = False
    align_corners: bool = False

    def check(self, config: Any, axes: int) -> None:
        """Checks the options of a config.

        Raises:
            ValueError: for options that do not fit together.
        """
        name = type(config).__name__
        smooth = self.interpolation in ("bicubic", "bilinear")
        if not smooth and (self.antialias or self.align_corners):
            raise ValueError(
                f"{name}.interpolation is {self.interpolation!r}, which has neither antialias nor align_corners. Leave "
                "them out, or use 'bicubic' or 'bilinear'."
            )
        if self.antialias and axes > 2:
            raise ValueError(f"{name}.antialias is only possible for a grid of two axes. Leave it out.")

    def resized(self, table: Tensor, size: tuple[int, ...]) -> Tensor:
        """Returns a table `(*old size, width)` at another size, `(*size, width)`, in its dtype.

        Raises:
            ValueError: if the table cannot be resized to this size.
        """
        old = tuple(table.shape[:-1])
        if size == old:
            return table
        planes = table.float().movedim(-1, 0)
        if len(old) == 3 and self.interpolation == "bicubic":
            if size[0] != old[0]:
                raise ValueError(
                    f"A table for {old[0]} frames cannot be resized to {size[0]} frames bicubically, which is defined "
                    "for the two axes of an image. Use interpolation='bilinear', or the same number of frames."
                )
            return self._interpolated(planes.transpose(0, 1), size[1:]).movedim(1, -1).to(table.dtype)
        return self._interpolated(planes.unsqueeze(0), size)[0].movedim(0, -1).to(table.dtype)

    def _interpolated(self, planes: Tensor, size: tuple[int, ...]) -> Tensor:
        """`(batch, channels, *old size)` to `(batch, channels, *size)`."""
        if self.interpolation == "nearest":
            return nn.functional.interpolate(planes, size=size, mode="nearest")
        mode = "trilinear" if len(size) == 3 else self.interpolation
        return nn.functional.interpolate(
            planes, size=size, mode=mode, align_corners=self.align_corners, antialias=self.antialias
        )


def _grids_of_call(positions: Positions, where: Places) -> tuple[list[tuple[int, ...]], Tensor | None]:
    """The sizes of the different grids of a call in tokens, none if they are unknown, and the grid of each token,
    `(batch or 1, length)` int64 or `None` if there is a single one. Reads the sizes once per forward call.
    """
    if positions.grid is not None and positions.coordinates is not None:
        return [positions.grid], None
    extents = where.extents
    if extents is None:
        return [], None

    def look() -> tuple[list[tuple[int, ...]], Tensor | None]:
        columns, index = extents.flatten(1).unique(dim=1, return_inverse=True)
        # Tokens without a place may have an empty grid; they never look at it.
        sizes = [tuple(max(length, 1) for length in size) for size in columns.T.tolist()]
        return sizes, None if len(sizes) == 1 else index.view(extents.shape[1:])

    return positions.remembered("grids", look, extents)


def _check_fit(sizes: list[tuple[int, ...]], grid: tuple[int, ...], scheme: str) -> None:
    """Refuses grids that are larger than a table which is not resized."""
    for size in sizes:
        if any(length > limit for length, limit in zip(size, grid, strict=True)):
            raise ValueError(
                f"The tokens of this call fill a grid of {by(size)}, larger than the {by(grid)} places of the scheme "
                f"{scheme!r}, and interpolation='none' does not resize its table. Pass smaller images, or patch with "
                f"interpolation='bilinear', or with grid={size} or more."
            )


def by(size: tuple[int, ...]) -> str:
    """Writes a size as "14 x 14"."""
    return " x ".join(map(str, size))


def tables_of_call(
    table: Tensor,
    positions: Positions,
    where: Places,
    resizing: Resizing,
    size_of_table: Callable[[tuple[int, ...]], tuple[int, ...]],
    grid: tuple[int, ...],
    scheme: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns one flat table for all grids of a call. It is `table` itself if their sizes are unknown, and for each of
    them with the interpolation "none".

    Args:
        table: `(rows, width)`, the rows of `size_of_table(grid)` in order.
        positions: the positions of the tokens.
        where: their places.
        resizing: how the table is resized.
        size_of_table: the size of the table for a grid.
        grid: the grid that the table is for.
        scheme: its name, for error messages.

    Returns:
        The rows of all tables, `(rows, width)`; the size of the table of each token, `(axes, batch or 1, length)` or
        `(axes, 1, 1)`; and its first row, `(batch or 1, length)`, or `None` if there is one table.

    Raises:
        ValueError: for a grid that the table cannot be resized to.
    """
    grids, index = _grids_of_call(positions, where)
    shape = size_of_table(grid)
    if not grids:
        sizes = positions.remembered(f"sizes {shape}", lambda: integers_on(table.device, *shape), positions.ids)
        return table, sizes.view(-1, 1, 1), None
    table = table.view(*shape, -1)
    if resizing.interpolation == "none":
        _check_fit(grids, grid, scheme)
        tables, index = [table], None
    else:
        tables = [resizing.resized(table, size_of_table(size)) for size in grids]
    sizes = torch.stack([integers_on(table.device, *resized.shape[:-1]) for resized in tables], dim=1)
    rows = [resized.flatten(0, -2) for resized in tables]
    if index is None:
        return rows[0], sizes.unsqueeze(-1), None
    starts = integers_on(table.device, 0, *(math.prod(resized.shape[:-1]) for resized in tables[:-1])).cumsum(0)
    return torch.cat(rows), sizes[:, index], starts[index]
