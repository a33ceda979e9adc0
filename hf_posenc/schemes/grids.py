"""Where tokens are on a grid: the coordinates that a model passes, or a sequence that fills a grid row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias, Positions
from hf_posenc.schemes.validation import whole_positions


@dataclass(frozen=True)
class Places:
    """The places of the tokens of one call.

    Args:
        coordinates: `(axes, batch or 1, length)`, the slowest axis first: (frame,) row, column. Any number where a
            token has no place.
        extents: `(axes, batch or 1, length)`, the size of the grid of each token; `None` if it is unknown.
        placed: `(batch or 1, length)` bool, false for tokens without a place; `None` if all tokens have one.
    """

    coordinates: Tensor
    extents: Tensor | None = None
    placed: Tensor | None = None


def places(
    positions: Positions, axes: int, scheme: str, grid: tuple[int, ...] | None = None, num_prefix_tokens: int = 0
) -> Places:
    """Returns the places that the model passed, or those of a sequence that fills `grid` row by row.

    Args:
        positions: the positions of the tokens.
        axes: number of axes of the scheme.
        scheme: its name, for error messages.
        grid: sizes of all axes except the first, for tokens without coordinates; `None` if the scheme requires
            coordinates.
        num_prefix_tokens: number of tokens before `grid`, which have no place.

    Raises:
        UnsupportedError: if the coordinates have another number of axes, or if there are none and `grid` is `None`.
    """
    coordinates = positions.coordinates
    if coordinates is not None:
        given = coordinates.shape[0]
        if given != axes:
            raise UnsupportedError(
                f"The tokens have positions on {given} axes, but the scheme {scheme!r} was built for {axes}. Give it "
                f"{given} axes: `axes={given}` (alibi, log_cpb, sinusoidal, t5), a `grid` of {given - 1} sizes "
                f"(rope_nd) or of {given} (swin, learned). 'mrope' is for time, height and width in the text part of "
                "a model."
            )
        return Places(coordinates, positions.extents, positions.placed)
    if grid is None:
        raise UnsupportedError(
            f"The scheme {scheme!r} has {axes} axes, and this model passed no coordinates for its tokens, only their "
            "order. Use axes=1, which reads the order, or a part of a model that has a grid, such as a vision encoder."
        )
    placed = positions.ids >= num_prefix_tokens if num_prefix_tokens else None
    return Places(grid_coordinates(positions.ids, grid, num_prefix_tokens), None, placed)


def grid_coordinates(ids: Tensor, grid: Sequence[int | Tensor], num_prefix_tokens: int = 0) -> Tensor:
    """Returns the coordinates of tokens that fill a grid row by row.

    Args:
        ids: `(batch or 1, length)`, positions along the sequence.
        grid: sizes of all axes except the first, in tokens: `(width,)` in two dimensions, `(height, width)` in three. A
            size may differ between the rows of a batch.
        num_prefix_tokens: number of tokens before the grid. These tokens and padding get coordinates 0.

    Returns:
        `(axes, batch or 1, length)` in the dtype of `ids`, the fastest axis last: row before column.
    """
    left = (ids - num_prefix_tokens).clamp(min=0)
    coordinates = []
    for size in reversed(grid):
        coordinates.append(left % size)
        left = torch.div(left, size, rounding_mode="floor")
    return torch.stack([left, *reversed(coordinates)])


def distances_by_axis(where: Places, pairs: AttentionPairs) -> Tensor:
    """`(axes, batch or 1, query_len, key_len)`: the key's coordinate minus the query's, on each axis."""
    keys = where.coordinates
    return keys.unsqueeze(-2) - keys.index_select(-1, pairs.query_slots).unsqueeze(-1)


class GridBias(PairwiseBias):
    """Base class of biases of the distances of two tokens along the axes of a grid."""

    reads_coordinates = True
    reads_later_keys = False
    #: Name of the scheme, for error messages.
    scheme: ClassVar[str]
    #: Number of axes.
    axes: int
    #: The bias of pairs with a token without a place.
    without_place: float = 0.0

    def of_distances(self, distances: Tensor, keys: Positions) -> Tensor:
        """The bias of pairs, `(batch or 1, heads, query_len, key_len)`.

        Args:
            distances: along the axes, `(axes, batch or 1, query_len, key_len)`.
            keys: whose positions tell how large distances can be.
        """
        raise NotImplementedError

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: if the model passed no coordinates, those of another number of axes, or real numbers where the
                scheme needs integers.
        """
        where = places(pairs.keys, self.axes, self.scheme)
        if self.whole_positions:
            whole_positions(where.coordinates, self.scheme)
        bias = self.of_distances(distances_by_axis(where, pairs), pairs.keys)
        if where.placed is None:
            return bias
        queries = where.placed.index_select(-1, pairs.query_slots)
        both = queries.unsqueeze(-1) & where.placed.unsqueeze(-2)
        return bias.where(both.unsqueeze(1), self.without_place)


def entries_of_pairs(table: Tensor, index: Tensor) -> Tensor:
    """Looks up one row of a table for each pair.

    Args:
        table: `(rows, heads)`.
        index: `(batch or 1, query_len, key_len)` int64.

    Returns:
        `(batch or 1, heads, query_len, key_len)`, in memory by head, which takes a tenth of the time of a transpose.
    """
    return table.T.index_select(1, index.flatten()).view(-1, *index.shape).transpose(0, 1)


def share_of_axes(pairs: int, axes: int) -> list[int]:
    """Returns how many of `pairs` each axis gets; those that do not divide evenly go to the first axes."""
    return [len(range(axis, pairs, axes)) for axis in range(axes)]
