"""Tables as plain text, as Markdown and as HTML."""

from __future__ import annotations

import contextvars
import copy
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

from hf_posenc.installation import require
from hf_posenc.wrapping import setting

#: No column is narrower than its longest word, or than this many characters if a word is longer.
_LONGEST_WORD = 24
_GAP = "  "

_width: contextvars.ContextVar[int | None] = contextvars.ContextVar("width", default=None)


def fitted_to(width: int | None) -> AbstractContextManager[None]:
    """Limits the width of text tables to this many characters within the context; `None` for no limit.

    Text wraps inside its column. Columns that do not fit next to the others follow in a further table, which repeats
    the first column.
    """
    return setting(_width, width)


def terminal_width() -> int | None:
    """Returns the width of the terminal, or `COLUMNS` if that is set; `None` if stdout is a pipe or a file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


Form = Literal["text", "markdown", "html"]


def format_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, form: Form = "text") -> str:
    """Returns a table with aligned columns: text on the left, numbers on the right.

    Args:
        headers: one name per column.
        rows: cells as text, one sequence per row.
        form: "text" for a terminal, "markdown" with pipes and a rule, as GitHub renders them, or "html", which needs
            pandas.

    Raises:
        ValueError: if the number of cells in a row differs from the number of headers.
    """
    rows = list(rows)
    columns = [_Column(cells) for cells in zip(headers, *rows, strict=True)]
    if form == "html":
        require("A table for a web page", "pandas")
        import pandas

        return str(pandas.DataFrame(rows, columns=list(headers)).to_html(index=False, border=0))
    if form == "markdown":
        rule = ["-" * (column.width - 1) + ":" if column.right else "-" * column.width for column in columns]
        header, *lines = _rows(columns)
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))
    width = _width.get()
    return "\n\n".join(_text(block, width) for block in _blocks(columns, width))


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table without padding, for generated pages."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, ["---"] * len(headers), *rows))


class _Column:
    """A column of a table: its heading and its cells."""

    def __init__(self, cells: Sequence[str]) -> None:
        self.cells = cells
        self.right = len(cells) > 1 and all(map(_is_number, cells[1:]))
        self.width = max(map(len, cells))
        #: The minimum width. Numbers are not broken; text wraps between words.
        self.least = max(
            len(cell) if _is_number(cell) else min(_LONGEST_WORD, max(map(len, cell.split()), default=0))
            for cell in cells
        )

    def aligned(self, text: str) -> str:
        return text.rjust(self.width) if self.right else text.ljust(self.width)

    def wrapped(self, cell: str) -> list[str]:
        """Returns the lines of a cell."""
        return textwrap.wrap(cell, self.width, break_on_hyphens=False) if len(cell) > self.width else [cell]


def _rows(columns: Sequence[_Column]) -> Iterator[list[str]]:
    """Returns the lines of the rows, as many for each as its longest cell needs."""
    for row in zip(*(column.cells for column in columns), strict=True):
        lines = [column.wrapped(cell) for column, cell in zip(columns, row, strict=True)]
        for texts in itertools.zip_longest(*lines, fillvalue=""):
            yield [column.aligned(text) for column, text in zip(columns, texts, strict=True)]


def _text(columns: Sequence[_Column], width: int | None) -> str:
    """Returns a table, with the widest columns narrowed until a line fits."""
    while width is not None and _total([column.width for column in columns]) > width:
        shrinkable = [column for column in columns if column.width > column.least]
        if not shrinkable:
            break
        max(shrinkable, key=lambda column: column.width).width -= 1
    header_lines = max(len(column.wrapped(column.cells[0])) for column in columns)
    lines = [_GAP.join(cells).rstrip() for cells in _rows(columns)]
    rule = _GAP.join("-" * column.width for column in columns)
    return "\n".join([*lines[:header_lines], rule, *lines[header_lines:]])


def _blocks(columns: list[_Column], width: int | None) -> list[list[_Column]]:
    """Returns blocks of columns that fit side by side. Every block starts with the first column."""
    if width is None or len(columns) < 3:
        return [columns]
    first, *others = columns
    blocks = [[first]]
    for column in others:
        if len(blocks[-1]) > 1 and _total([beside.least for beside in (*blocks[-1], column)]) > width:
            blocks.append([copy.copy(first)])
        blocks[-1].append(column)
    return blocks


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def format_number(value: float | None) -> str:
    """Formats with three significant digits, an exact zero as `0`, a missing value as `-`."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3g}"


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, a number with its interval ("1.65 ± 0.02"), a large one ("1,234"), or missing."""
    if cell in ("-", ""):
        return True
    try:
        for part in cell.split(" ± "):
            float(part.replace(",", ""))
    except ValueError:
        return False
    return True


def _decimals(digits: int, value: float) -> str:
    # Rounding may give a negative zero. Adding zero makes it positive.
    return f"{round(value, digits) + 0.0:.{digits}f}"


#: Functions that format a value, by the name of the style.
FORMATS: dict[str, Callable[[float], str]] = {
    "number": format_number,
    "signed": lambda value: ("+" if value > 0 else "") + format_number(value),
    "loss": "{:.4g}".format,
    "fraction": partial(_decimals, 3),
    "difference": lambda value: ("+" if round(value, 3) > 0 else "") + _decimals(3, value),
    "percent": lambda value: _decimals(0, 100 * value),
    "percent_tenths": lambda value: _decimals(1, 100 * value),
    "tenths": partial(_decimals, 1),
    "milliseconds": lambda value: _decimals(1, 1000 * value),
    "count": "{:.0f}".format,
    "text": str,
    "verdict": format_number,
}
