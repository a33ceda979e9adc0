"""Positions of patches: one grid in raster order, several images in a row, and parts of both."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

from hf_posenc.schemes.positions import Positions


def in_raster(grid: tuple[int, ...], length: int, suffix_tokens: int, device: torch.device | None) -> Positions:
    """The positions of `length` tokens in which the patches of a grid follow row by row.

    Args:
        grid: sizes of the grid.
        length: number of tokens. Those before the patches have no place.
        suffix_tokens: number of tokens without a place after the patches.
        device: device of the result.
    """
    patches = math.prod(grid)
    before = length - suffix_tokens - patches
    ids = torch.arange(length, device=device).unsqueeze(0)
    slots = ids - before
    placed = (slots >= 0) & (slots < patches)
    sizes = torch.stack([ids.new_full((1, length), size) for size in grid])
    coordinates = _unravelled(slots.where(placed, 0), list(grid))
    return Positions(ids, ids.new_full((1, 1), length), coordinates, None, sizes, placed, grid)


def of_images(sizes: Tensor, length: int, memo: dict[Hashable, Any]) -> Positions:
    """The positions of a padded batch of images, each in raster order.

    Args:
        sizes: `(batch, axes)` int64.
        length: number of tokens of a row, padding included.
        memo: as in `Positions`.
    """
    slots = torch.arange(length, device=sizes.device).expand(sizes.shape[0], -1)
    patches = sizes.prod(-1, keepdim=True)
    placed = slots < patches
    coordinates = _unravelled(slots.where(placed, 0), list(sizes.T.unsqueeze(-1)))
    extents = sizes.T.unsqueeze(-1).expand(-1, -1, length)
    ids = slots.where(placed, -1)
    return Positions(ids, patches, coordinates, None, extents, placed, memo=memo).bounded(length)


def of_padded_images(shown: Tensor, memo: dict[Hashable, Any]) -> Positions:
    """The positions of images of different sizes, each in the corner of a common grid.

    Args:
        shown: `(batch, rows, columns)` bool, true at the patches of each image.
        memo: as in `Positions`.
    """
    sizes = torch.stack([shown[:, :, 0].sum(1), shown[:, 0].sum(1)])
    rows, columns = (torch.arange(size, device=shown.device) for size in shown.shape[1:])
    coordinates = torch.stack([rows.repeat_interleave(len(columns)), columns.repeat(len(rows))]).unsqueeze(1)
    extents = sizes.unsqueeze(-1).expand(-1, -1, shown[0].numel())
    placed = (coordinates < extents).all(0)
    # The number of a patch is the one that it has in its image alone.
    ids = (coordinates[0] * extents[1] + coordinates[1]).where(placed, -1)
    coordinates = coordinates.expand_as(extents).where(placed, 0)
    found = Positions(ids, sizes.prod(0).unsqueeze(-1), coordinates, None, extents, placed, memo=memo)
    return found.bounded(ids.shape[-1])


def packed(coordinates: Tensor, memo: dict[Hashable, Any]) -> Positions:
    """The positions of images that follow each other in one row.

    A patch at the origin begins an image, or a frame of a video.

    Args:
        coordinates: `(axes, 1, length)` int64, negative for class tokens.
        memo: as in `Positions`.
    """
    placed = (coordinates >= 0).all(0)
    image = ((coordinates[:, 0] == 0).all(0).cumsum(0) - 1).clamp(min=0)
    coordinates = coordinates.clamp(min=0)
    rows = coordinates[:, 0]
    # As many images as tokens at most, so that no value is read from the device.
    most = rows.new_zeros(rows.shape).scatter_reduce(1, image.expand_as(rows), rows, "amax")
    extents = (most.index_select(1, image) + 1).unsqueeze(1)
    slots = torch.arange(rows.shape[1], device=rows.device)
    first = slots.new_full((rows.shape[1],), rows.shape[1]).scatter_reduce(0, image, slots, "amin")
    ids = (slots - first.index_select(0, image)).unsqueeze(0)
    found = Positions(ids, ids.amax(-1, keepdim=True) + 1, coordinates, None, extents, placed, memo=memo)
    return found.bounded(ids.shape[-1])


def places_of_images(sizes: Tensor) -> Tensor:
    """`(axes, 1, length)` int64: the coordinates of images that follow each other in one row, each in raster order.

    Args:
        sizes: `(images, axes)` integers.
    """
    grids = [torch.cartesian_prod(*(torch.arange(size) for size in image)) for image in sizes.tolist()]
    return torch.cat(grids).T.unsqueeze(1).to(sizes.device)


def merged(coordinates: Tensor) -> Tensor:
    """The coordinates of patches that were merged two by two, in the order of the first patch of each.

    Args:
        coordinates: `(axes, 1, length)` int64 of the patches, rows and columns last.
    """
    first = (coordinates[-2:, 0] % 2 == 0).all(0)
    places = coordinates[..., first]
    return torch.cat([places[:-2], places[-2:] // 2])


def selected(positions: Positions, indices: Tensor, memo: dict[Hashable, Any]) -> Positions:
    """Some of the tokens, in another order.

    Args:
        positions: the positions of all tokens.
        indices: `(batch or 1, length)` int64.
        memo: as in `Positions`.
    """

    def take(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        rows = max(values.shape[-2], indices.shape[0])
        shape = (*values.shape[:-2], rows, -1)
        return values.expand(shape).gather(-1, indices.expand(*values.shape[:-2], rows, -1))

    ids = cast("Tensor", take(positions.ids))
    coordinates, extents, placed = map(take, (positions.coordinates, positions.extents, positions.placed))
    found = Positions(ids, positions.lengths, coordinates, None, extents, placed, positions.grid, memo=memo)
    return found.bounded(positions.ids.shape[-1])


def _unravelled(places: Tensor, sizes: list[Any]) -> Tensor:
    """`(axes, *places.shape)`: the coordinates of places in raster order, the last axis fastest."""
    coordinates = []
    for size in reversed(sizes[1:]):
        coordinates.append(places % size)
        places = torch.div(places, size, rounding_mode="floor")
    return torch.stack([places, *reversed(coordinates)])
