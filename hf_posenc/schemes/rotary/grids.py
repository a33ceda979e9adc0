"""Where a token stands on several axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.validation import check_integers


def grid_coordinates(ids: Tensor, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Tensor:
    """The coordinates of tokens that fill a grid row by row.

    Args:
        ids: `(batch or 1, length)`, positions along the sequence.
        grid: the sizes of all axes but the first, in tokens: `(width,)` in two dimensions, `(height, width)` in three.
        num_prefix_tokens: how many tokens come before the grid; they, and padding, get the coordinates 0.

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
    """`(axes, batch or 1, length)` as the caller placed the tokens, or `None` where it did not.

    Raises:
        ValueError: if the caller placed them on another number of axes.
    """
    coordinates = positions.coordinates
    if coordinates is not None and coordinates.shape[0] != axes:
        raise ValueError(
            f"Tokens are placed on {coordinates.shape[0]} axes, but the scheme {scheme!r} was built for {axes}. Build "
            "it with as many axes, or pass position_ids of one axis."
        )
    return coordinates


def check_grid(config: Any) -> None:
    """Requires `config.grid` to be a non-empty sequence of positive integers, and stores it as a tuple.

    Raises:
        ValueError: for any other value.
    """
    check_integers(config, "grid", minimum=1, least=1)
