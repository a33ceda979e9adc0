"""Coordinates of tokens on several axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.validation import check_integers


def grid_coordinates(ids: Tensor, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Tensor:
    """Returns the coordinates of tokens that fill a grid row by row.

    Args:
        ids: `(batch or 1, length)`, positions along the sequence.
        grid: sizes of all axes except the first, in tokens: `(width,)` in two dimensions, `(height, width)` in three.
        num_prefix_tokens: number of tokens before the grid. These tokens and padding get coordinates 0.

    Returns:
        `(axes, batch or 1, length)` in the dtype of `ids`, the fastest axis last: row before column.
    """
    places = (ids - num_prefix_tokens).clamp(min=0)
    coordinates = []
    for size in reversed(grid):
        coordinates.append(places % size)
        places = torch.div(places, size, rounding_mode="floor")
    return torch.stack([places, *reversed(coordinates)])


def given_coordinates(positions: Positions, axes: int, scheme: str) -> Tensor | None:
    """Returns the coordinates that the caller passed, `(axes, batch or 1, length)`, or `None`.

    Raises:
        ValueError: if the caller passed another number of axes.
    """
    coordinates = positions.coordinates
    if coordinates is not None and coordinates.shape[0] != axes:
        raise ValueError(
            f"The position_ids have {coordinates.shape[0]} axes, but the scheme {scheme!r} was built for {axes}. "
            "Build it with the same number of axes, or pass position_ids of one axis."
        )
    return coordinates


def check_grid(config: Any) -> None:
    """Checks that `config.grid` is a non-empty sequence of positive integers, and stores it as a tuple.

    Raises:
        ValueError: for any other value.
    """
    check_integers(config, "grid", minimum=1, least=1)
