"""A learned bias per displacement on a grid, as in Swin and BEiT."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.grid_resizing import INTERPOLATIONS, Resizing, tables_of_call
from hf_posenc.schemes.grids import Places, distances_by_axis, entries_of_pairs, places
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias
from hf_posenc.schemes.scheme import BuildContext, SharedConfig, register_scheme
from hf_posenc.schemes.validation import MOST_ROWS, option, whole_positions
from hf_posenc.schemes.weights import NativeTable

#: Entries of BEiT for pairs with a token without a place: that token as the query, as the key, and as both.
CLASS_ENTRIES = 3


class SwinBias(NativeTable, PairwiseBias):
    """One trainable number per displacement and head, in a table that is resized to the grid of the call."""

    reads_coordinates = True
    reads_later_keys = False
    whole_positions = True
    reads_content = False

    def __init__(self, config: SwinConfig, context: BuildContext) -> None:
        super().__init__()
        self.axes = len(config.grid)
        #: Layers with equal names have equal rows for the same positions.
        self._name = repr(config)
        self.grid = config.grid
        self.num_prefix_tokens = config.num_prefix_tokens
        self.class_entries = config.class_entries
        self.resizing = Resizing(config.interpolation)
        self.size = table_size(self.grid)
        self.displacements = math.prod(self.size)
        shape = (self.displacements + CLASS_ENTRIES * self.class_entries, context.num_heads)
        self.weight = self.learned("weight", shape, std=context.initializer_range)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: for a grid that the table cannot be resized to, coordinates of another number of axes, or
                coordinates that are not integers.
        """
        given = pairs.keys, self.axes, SwinConfig.name, self.grid[1:], self.num_prefix_tokens
        where = pairs.remembered(f"places of {self._name}", lambda: places(*given))
        whole_positions(where.coordinates, SwinConfig.name)
        rows, entries = self._rows_and_table(pairs, where)
        if where.placed is not None:
            keys = where.placed.unsqueeze(-2)
            queries = where.placed.index_select(-1, pairs.query_slots).unsqueeze(-1)
            # The entry after the displacements: for a query without a place, a key, or both; entry 3 is a zero.
            kind = torch.where(queries, 1, torch.where(keys, 0, 2)) if self.class_entries else CLASS_ENTRIES
            rows = rows.where(queries & keys, entries.shape[0] + kind)
            without_place = self.weight[self.displacements :].float()
            zero = without_place.new_zeros(CLASS_ENTRIES + 1 - without_place.shape[0], without_place.shape[1])
            entries = torch.cat((entries, without_place, zero))
        return entries_of_pairs(entries, rows)

    def _rows_and_table(self, pairs: AttentionPairs, where: Places) -> tuple[Tensor, Tensor]:
        """The row of each pair, `(batch or 1, query_len, key_len)`, and the rows, `(rows, heads)` in float32."""
        table = (self.weight[: self.displacements] if self.class_entries else self.weight).float()
        entries, sizes, start = tables_of_call(
            table, pairs.keys, where, self.resizing, table_size, self.grid, SwinConfig.name
        )

        def rows() -> Tensor:
            back = -distances_by_axis(where, pairs)
            of_queries = sizes.index_select(-1, pairs.query_slots) if start is not None else sizes
            row = torch.zeros_like(back[0])
            for axis, steps in enumerate(back):
                size = of_queries[axis].unsqueeze(-1)
                # Beyond the table only without a known grid, between grids, and for tokens without a place.
                row = row * size + (steps + (size - 1) // 2).clamp(min=0).minimum(size - 1)
            return row if start is None else row + start.index_select(-1, pairs.query_slots).unsqueeze(-1)

        return pairs.remembered(f"rows of {self._name}", rows), entries


@register_scheme
class SwinConfig(SharedConfig):
    """A learned bias per displacement on a grid (Swin, arXiv:2103.14030, equation 4; BEiT, arXiv:2106.08254).

    For two patches of a grid of `R` rows and `C` columns, and a table `W` of `((2R - 1) (2C - 1), heads)`::

        bias(i, j) = W[(row_i - row_j + R - 1) (2C - 1) + column_i - column_j + C - 1, h]

    A grid of three sizes has a third axis, frames, in the same way (Video Swin, arXiv:2106.13230). If the grid of a
    call has another size, the table is resized to `(2R' - 1, 2C' - 1)`, as BEiT in transformers does. Swin itself
    divides an image into windows of the size of its table; in other models, the table covers the whole image.

    A token without a place (a class or register token) has the bias 0 with all others, or, with `class_entries`, BEiT's
    three entries at the end of the table: for that token as the query, as the key, and as both. In a model without
    coordinates, the tokens fill the columns of the grid row by row, and longer distances have the entry at the edge of
    the table.

    Args:
        grid: the sizes that the table is for: (rows, columns), or (frames, rows, columns). The default fits a ViT with
            224 pixels in patches of 16.
        class_entries: whether pairs with a token without a place have entries of their own.
        num_prefix_tokens: number of tokens before the grid, in a model without coordinates.
        interpolation: how the table is resized: "bilinear", "bicubic", "nearest", or "none", which reads the middle of
            the table for smaller grids and refuses larger ones.
        shared: whether all layers share one table; with `False` every layer has its own, as in Swin and BEiT.
    """

    name: ClassVar[str] = "swin"
    part_class = SwinBias

    grid: tuple[int, ...] = option((14, 14), minimum=1, least=2, most=3)
    class_entries: bool = option(False)
    num_prefix_tokens: int = option(0, minimum=0)
    interpolation: str = option("bilinear", choices=INTERPOLATIONS)
    shared: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        displacements = math.prod(table_size(self.grid))
        if displacements > MOST_ROWS:
            raise ValueError(
                f"SwinConfig.grid is {self.grid}, which has {displacements} displacements; a table has at "
                f"most {MOST_ROWS} rows. Give a smaller grid; the table is resized to the grid of a call."
            )


def table_size(grid: tuple[int, ...]) -> tuple[int, ...]:
    """The number of displacements along each axis of a grid."""
    return tuple(2 * size - 1 for size in grid)
