"""Learned tables with one row per position, in the order of tokens or on a grid."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.grid_resizing import INTERPOLATIONS, Resizing, by, tables_of_call
from hf_posenc.schemes.grids import Places, places
from hf_posenc.schemes.parts import AdditiveEncoding, Positions, Reach
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import MOST_ROWS, option, rows_of_table, whole_positions


class LearnedTable(AdditiveEncoding):
    """A trainable table.

    Args:
        rows: number of its rows.
        leading_rows: how many of them, the first ones, are not of positions.
        context: the place in the model.
    """

    whole_positions = True

    def __init__(self, rows: int, leading_rows: int, context: BuildContext) -> None:
        super().__init__()
        self.leading_rows = leading_rows
        self.weight = self.learned("weight", (rows, context.hidden_size), std=context.initializer_range)

    def separated(self, native: Tensor) -> tuple[Tensor, Tensor] | None:
        """The leading rows of a stock table, and those of its positions; `None` for a table that does not fit."""
        if native.ndim != 2 or native.shape[1] != self.weight.shape[1] or native.shape[0] <= self.leading_rows:
            return None
        return native[: self.leading_rows], native[self.leading_rows :]


class LearnedEncoding(LearnedTable):
    """Row `p + offset` of a trainable table."""

    def __init__(self, config: LearnedConfig, context: BuildContext) -> None:
        num_positions = rows_of_table(config, context.max_positions)
        super().__init__(num_positions + config.offset, config.offset, context)
        self.num_positions = num_positions
        self.offset = config.offset
        self.extension = config.extension
        self.length_dependent = config.extension == "interpolate"
        if config.extension == "error":
            self.length_reach = Reach(
                num_positions,
                "of the learned table. Shorten the input, or patch with 'learned' and a larger num_positions, or with "
                f"extension='interpolate' to stretch the {num_positions} rows over longer sequences.",
                made_for=num_positions,
            )

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in the dtype of the table.

        Raises:
            SequenceLengthError: for a position without a row, with `extension="error"`.
            ValueError: for positions that are not integers.
        """
        whole_positions(positions.ids, "learned")
        if self.extension == "interpolate":
            return self._interpolated(positions)
        self.length_reach.check(positions)
        return nn.functional.embedding(self._rows(positions.ids), self.weight)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if a cache grows past the table, because the rows are then stretched differently at every length."""
        if self.extension == "interpolate" and cached_length > 0 and total_length > self.num_positions:
            raise UnsupportedError(
                f"Past its {self.num_positions} rows the learned table is stretched to the length of the sequence, so "
                f"the {cached_length} cached tokens no longer fit a sequence of {total_length}. Generate with "
                f"use_cache=False, or build a table of num_positions={total_length} or more."
            )

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table `(native positions + offset, hidden)`.

        A shorter table takes the first rows. A longer one keeps fresh rows past the native ones, or, with
        `extension="interpolate"`, takes the native rows stretched over its whole length.
        """
        parts = self.separated(native)
        if parts is None:
            return False
        leading, rows = parts
        if len(rows) < self.num_positions and self.extension == "interpolate":
            ids = torch.arange(self.num_positions, device=native.device)
            low, fraction = _stretch(ids, len(rows), torch.as_tensor(self.num_positions, device=native.device))
            native = torch.cat((leading, _interpolate(rows, low, fraction)))
        count = min(native.shape[0], self.weight.shape[0])
        self.weight[:count].copy_(native[:count])
        return True

    def _rows(self, ids: Tensor) -> Tensor:
        """Returns the row index of each position. Padding (a negative position) uses the rows below the offset."""
        return (ids + self.offset).clamp(min=0)

    def _interpolated(self, positions: Positions) -> Tensor:
        ids = positions.ids.clamp(min=0)
        total = torch.maximum(positions.lengths, ids.amax(dim=-1, keepdim=True) + 1).clamp(min=self.num_positions)
        low, fraction = _stretch(ids, self.num_positions, total)
        low = torch.where(positions.ids < 0, self._rows(positions.ids), low + self.offset)
        return _interpolate(self.weight, low, fraction)


class LearnedGridEncoding(LearnedTable):
    """The row of a token's place in a table that is resized to the grid of the call, or a separate row without one."""

    reads_coordinates = True

    def __init__(self, config: LearnedConfig, context: BuildContext) -> None:
        assert config.grid is not None
        super().__init__(config.num_prefix_tokens + math.prod(config.grid), config.num_prefix_tokens, context)
        self.axes = len(config.grid)
        self.grid = config.grid
        self.num_prefix_tokens = config.num_prefix_tokens
        self.resizing = config.resizing
        # The reach in a model without coordinates. Otherwise the table is resized.
        self.length_reach = Reach(
            len(self.weight),
            f"of the learned grid of {by(self.grid)}, and without coordinates from the model it cannot be resized. "
            "Shorten the input, or patch with 'learned' and a larger grid.",
            made_for=len(self.weight),
        )

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
            # Without coordinates, a call may begin in the middle of a sequence or contain several.
            given = positions.coordinates is not None
            ranks = (~where.placed & ~without).long().cumsum(-1) - 1 if given else positions.ids
            vectors = torch.where(where.placed.unsqueeze(-1), vectors, self._of_prefix(ranks))
        return vectors.masked_fill(without.unsqueeze(-1), 0.0)

    def _of_places(self, positions: Positions, where: Places) -> Tensor:
        """The row of each token's place; any row where a token has none."""
        coordinates = whole_positions(where.coordinates, "learned")
        if where.placed is not None:
            coordinates = coordinates * where.placed
        if positions.coordinates is not None and positions.grid is None and where.extents is None:
            self._check_coordinates(coordinates)
        table = self.weight[self.num_prefix_tokens :]
        rows, sizes, start = tables_of_call(
            table, positions, where, self.resizing, lambda size: size, self.grid, "learned"
        )
        row = coordinates[0]
        for axis in range(1, self.axes):
            row = row * sizes[axis] + coordinates[axis]
        return nn.functional.embedding(row if start is None else row + start, rows)

    def _of_prefix(self, ranks: Tensor) -> Tensor:
        """The separate row of each token without a place, by their order; zeros past the last row."""
        if not self.num_prefix_tokens:
            return self.weight.new_zeros(*ranks.shape, self.weight.shape[-1])
        rows = nn.functional.embedding(ranks.clamp(0, self.num_prefix_tokens - 1), self.weight)
        return rows.masked_fill((ranks >= self.num_prefix_tokens).unsqueeze(-1), 0.0)

    def _check_coordinates(self, coordinates: Tensor) -> None:
        """Refuses places outside the table where the size of the call's grid is unknown."""
        if torch.compiler.is_compiling() or coordinates.is_meta or coordinates.numel() == 0:
            return
        largest = coordinates.flatten(1).amax(1).tolist()
        if any(coordinate >= size for coordinate, size in zip(largest, self.grid, strict=True)):
            needed = tuple(max(coordinate + 1, size) for coordinate, size in zip(largest, self.grid, strict=True))
            raise ValueError(
                f"Tokens are at coordinates up to {tuple(largest)}, outside of the learned grid of {by(self.grid)}, "
                f"and the size of their grid is unknown, so the table cannot be resized. Patch with grid={needed}."
            )

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table `(num_prefix_tokens + places, hidden)`. That of another square grid is resized first."""
        parts = self.separated(native)
        if parts is None:
            return False
        prefix, rows = parts
        if native.shape != self.weight.shape:
            side = math.isqrt(len(rows))
            if side**2 != len(rows) or self.axes != 2 or self.resizing.interpolation == "none":
                return False
            rows = self.resizing.resized(rows.view(side, side, -1), self.grid).flatten(0, 1)
        self.weight.copy_(torch.cat((prefix, rows)))
        return True


@register_scheme
class LearnedConfig(SchemeConfig):
    """Adds a learned vector per position (BERT, arXiv:1810.04805; GPT-2).

    To a token at position p it adds row p of a trained table::

        PE(p) = W[p + offset]        W is (offset + num_positions, hidden), drawn from N(0, initializer_range)

    Rows that are not used in training keep their random initialization, so a model trained on short sequences has not
    learned later positions.

    With a `grid`, a token has the row of its place (ViT, arXiv:2010.11929)::

        PE(row, column) = W[num_prefix_tokens + row * columns + column]

    and the tokens without a place (class and register tokens) have the first `num_prefix_tokens` rows, in their order;
    further ones get zeros. If the grid of a call has another size, the rows of the grid are resized to it, as
    `interpolate_pos_encoding` of transformers does. In a model without coordinates, the tokens fill the grid row by
    row.

    Args:
        num_positions: number of positions with a row, at most 2**20; `None` takes the model's own length.
        offset: number of rows before the row of position 0: 2 in OPT and BART, `padding_idx + 1` in RoBERTa. Padding
            tokens use these rows. At most 2**20.
        extension: past the table, "error" raises `SequenceLengthError`; "interpolate" stretches the rows linearly over
            the length of the sequence (position interpolation, arXiv:2306.15595, for tables). A grid has its own
            option for this.
        grid: (rows, columns) or (frames, rows, columns) of a table over a grid, instead of `num_positions`.
        num_prefix_tokens: number of rows for tokens without a place; only with a grid.
        interpolation: how the rows of a grid are resized: "bicubic" (ViT, DINOv2), "bilinear" (SigLIP 2), "nearest"
            (Idefics 2), or "none", which uses the first rows and columns and refuses larger grids. A bicubic table of
            three axes is resized frame by frame, for the same number of frames.
        antialias: whether resizing to a smaller grid averages (SigLIP 2, DINOv2 with registers).
        align_corners: whether the corners of both grids coincide when they are resized, instead of their outer edges
            (Qwen3-VL).
    """

    name: ClassVar[str] = "learned"

    num_positions: int | None = option(None, minimum=1, maximum=MOST_ROWS)
    offset: int = option(0, minimum=0, maximum=MOST_ROWS)
    extension: str = option("error", choices=("error", "interpolate"))
    grid: tuple[int, ...] | None = option(None, minimum=1, least=2, most=3)
    num_prefix_tokens: int = option(0, minimum=0, maximum=MOST_ROWS)
    interpolation: str = option("bicubic", choices=INTERPOLATIONS)
    antialias: bool = option(False)
    align_corners: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resizing.check(self, 0 if self.grid is None else len(self.grid))
        if self.grid is not None:
            self._check_against_grid(
                ("num_positions", "offset", "extension"), "is for a table over the order of tokens"
            )
            if math.prod(self.grid) > MOST_ROWS:
                raise ValueError(
                    f"LearnedConfig.grid is {self.grid}, {math.prod(self.grid)} places; a table has at most "
                    f"{MOST_ROWS} rows. Give a smaller grid; its rows are resized to larger ones."
                )
        else:
            options = ("num_prefix_tokens", "interpolation", "antialias", "align_corners")
            self._check_against_grid(options, "is for a table over a grid")

    def _check_against_grid(self, options: tuple[str, ...], purpose: str) -> None:
        for name in options:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise ValueError(
                    f"LearnedConfig.{name} is {value!r}, which {purpose}, but grid is {self.grid}. Leave one of them "
                    "out."
                )

    @property
    def resizing(self) -> Resizing:
        """How the rows of a grid are resized."""
        return Resizing(self.interpolation, self.antialias, self.align_corners)

    @property
    def part_class(self) -> type[LearnedGridEncoding | LearnedEncoding]:  # type: ignore[override]
        """The table."""
        return LearnedEncoding if self.grid is None else LearnedGridEncoding


def _stretch(ids: Tensor, rows: int, total: Tensor) -> tuple[Tensor, Tensor]:
    """`ids * (rows - 1) / (total - 1)` as a row index and a fraction, computed exactly with integers."""
    divisor = (total - 1).clamp(min=1)
    scaled = ids * (rows - 1) if rows > 1 else ids * 0
    # With total == rows this is the identity, also for the one-row table, whose only position is 0.
    low = torch.div(scaled, divisor, rounding_mode="floor")
    return low, (scaled - low * divisor).float() / divisor


def _interpolate(table: Tensor, low: Tensor, fraction: Tensor) -> Tensor:
    """Interpolates `(rows, hidden)` at `low + fraction` to `(..., hidden)`; without a fraction, rows are unchanged."""
    high = (low + 1).clamp(max=table.shape[0] - 1)
    weight = fraction.unsqueeze(-1)
    lower, upper = nn.functional.embedding(low, table), nn.functional.embedding(high, table)
    return (lower * (1 - weight) + upper * weight).to(table.dtype)
