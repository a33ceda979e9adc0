"""A learned table with one row per place of a grid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_posenc.schemes.config import BuildContext
from hf_posenc.schemes.grids import Places, places
from hf_posenc.schemes.parts import AdditiveEncoding, Positions, Reach
from hf_posenc.schemes.resizing import by, tables_of_call
from hf_posenc.schemes.validation import whole_positions
from hf_posenc.schemes.weights import NormalWeights

if TYPE_CHECKING:
    from hf_posenc.schemes.additive.learned import LearnedConfig


class LearnedGridEncoding(NormalWeights, AdditiveEncoding):
    """The row of a token's place in a table that is resized to the grid of the call, or an own row without a place."""

    reads_coordinates = True
    whole_positions = True

    def __init__(self, config: LearnedConfig, context: BuildContext) -> None:
        super().__init__()
        grid, num_prefix_tokens = config.grid, config.num_prefix_tokens
        assert grid is not None
        self.axes = len(grid)
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.resizing = config.resizing
        self.initializer_range = context.initializer_range
        self.weight = nn.Parameter(torch.empty(num_prefix_tokens + math.prod(grid), context.hidden_size))
        # Of a model without coordinates; otherwise the table is resized.
        self.length_reach = Reach(
            len(self.weight),
            f"of the learned grid of {by(grid)}, and without coordinates from the model it cannot be resized. Shorten "
            "the input, or patch with 'learned' and a larger grid.",
            made_for=len(self.weight),
        )
        self.reset_parameters()

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in the dtype of the table. Padding and tokens without a place past
        the prefix tokens get zeros.

        Raises:
            SequenceLengthError: without coordinates, for more tokens than the table has rows.
            ValueError: for a grid that the table cannot be resized to, coordinates of another number of axes, or
                positions that are not integers.
        """
        whole_positions(positions.ids, "learned")
        if positions.coordinates is None:
            self.length_reach.check(positions)
        where = places(positions, self.axes, "learned", self.grid[1:], self.num_prefix_tokens)
        vectors = self._of_places(positions, where)
        without = positions.ids < 0
        if where.placed is not None:
            vectors = torch.where(where.placed.unsqueeze(-1), vectors, self._of_prefix(~where.placed & ~without))
        return vectors.masked_fill(without.unsqueeze(-1), 0.0)

    def _of_places(self, positions: Positions, where: Places) -> Tensor:
        """The row of each token's place; any row where a token has none."""
        coordinates = whole_positions(where.coordinates, "learned")
        if where.placed is not None:
            coordinates = coordinates * where.placed
        if positions.coordinates is not None and positions.grid is None and where.extents is None:
            self._check_coordinates(coordinates)
        table = self.weight[self.num_prefix_tokens :].view(*self.grid, -1)
        rows, sizes, start = tables_of_call(
            table, positions, where, self.resizing, lambda size: size, self.grid, "learned"
        )
        row = coordinates[0]
        for axis in range(1, self.axes):
            row = row * sizes[axis] + coordinates[axis]
        return nn.functional.embedding(row if start is None else row + start, rows)

    def _of_prefix(self, unplaced: Tensor) -> Tensor:
        """The own row of each token without a place, in their order; zeros past the last row."""
        rank = unplaced.long().cumsum(-1) - 1
        if not self.num_prefix_tokens:
            return self.weight.new_zeros(*rank.shape, self.weight.shape[-1])
        rows = nn.functional.embedding(rank.clamp(0, self.num_prefix_tokens - 1), self.weight)
        return rows.masked_fill((rank >= self.num_prefix_tokens).unsqueeze(-1), 0.0)

    def _check_coordinates(self, coordinates: Tensor) -> None:
        """Refuses places outside the table where the size of the call's grid is unknown."""
        if torch.compiler.is_compiling() or coordinates.is_meta or coordinates.numel() == 0:
            return
        largest = coordinates.flatten(1).amax(1).tolist()
        if any(one >= size for one, size in zip(largest, self.grid, strict=True)):
            needed = tuple(max(one + 1, size) for one, size in zip(largest, self.grid, strict=True))
            raise ValueError(
                f"Tokens are at coordinates up to {tuple(largest)}, outside of the learned grid of {by(self.grid)}, "
                f"and the size of their grid is unknown, so that it cannot be resized. Patch with grid={needed}."
            )

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table `(num_prefix_tokens + places, hidden)`; one of a square grid of another size is resized
        first.
        """
        count = native.shape[0] - self.num_prefix_tokens
        if native.ndim != 2 or native.shape[1] != self.weight.shape[1] or count < 1:
            return False
        prefix, places_of_grid = native[: self.num_prefix_tokens], native[self.num_prefix_tokens :]
        if native.shape != self.weight.shape:
            side = math.isqrt(count)
            if side**2 != count or self.axes != 2 or self.resizing.interpolation == "none":
                return False
            places_of_grid = self.resizing.resized(places_of_grid.view(side, side, -1), self.grid).flatten(0, 1)
        self.weight.copy_(torch.cat((prefix, places_of_grid)))
        return True
