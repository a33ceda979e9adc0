"""Tables as plain text, as Markdown and as HTML."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from hf_posenc.installation import require

#: No column is narrower than its longest word, or than this many characters if a word is longer.
_LONGEST_WORD = 24
_GAP = "  "

_width: contextvars.ContextVar[int | None] = contextvars.ContextVar("width", default=None)


@contextlib.contextmanager
def fitted_to(width: int | None) -> Iterator[None]:
    """Limits the width of text tables to this many characters within the context; `None` for no limit.

    Text wraps inside its column. Columns that do not fit next to the others follow in a further table, which repeats
    the first column.
    """
    token = _width.set(width)
    try:
        yield
    finally:
        _width.reset(token)


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
    columns = [list(column) for column in zip(headers, *rows, strict=True)]
    if form == "html":
        require("A table for a web page", "pandas")
        import pandas

        return str(pandas.DataFrame(rows, columns=list(headers)).to_html(index=False, border=0))
    if form == "markdown":
        return _markdown(columns)
    width = _width.get()
    return "\n\n".join(_text(block, width) for block in _blocks(columns, width))


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table without padding, for generated pages."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, ["---"] * len(headers), *rows))


def _markdown(columns: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in columns]
    right = [_is_right(column) for column in columns]
    rule = ["-" * (width - 1) + ":" if is_right else "-" * width for width, is_right in zip(widths, right, strict=True)]
    header, *rows = (_aligned(row, widths, right) for row in zip(*columns, strict=True))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def _text(columns: Sequence[Sequence[str]], width: int | None) -> str:
    right = [_is_right(column) for column in columns]
    widths = _widths(columns, width)
    header, *rows = (_lines(row, widths, right) for row in zip(*columns, strict=True))
    return "\n".join([*header, _GAP.join("-" * size for size in widths), *itertools.chain.from_iterable(rows)])


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Returns the lines of one row, as many as its longest cell needs."""
    wrapped = [
        textwrap.wrap(cell, size, break_on_hyphens=False) if len(cell) > size else [cell]
        for cell, size in zip(row, widths, strict=True)
    ]
    return [
        _GAP.join(_aligned(cells, widths, right)).rstrip() for cells in itertools.zip_longest(*wrapped, fillvalue="")
    ]


def _blocks(columns: list[list[str]], width: int | None) -> list[list[list[str]]]:
    """Returns blocks of columns that fit side by side. Every block starts with the first column."""
    if width is None or len(columns) < 3:
        return [columns]
    first, *others = columns
    blocks: list[list[list[str]]] = [[first]]
    for column in others:
        if len(blocks[-1]) > 1 and _total([_least(beside) for beside in (*blocks[-1], column)]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    return blocks


def _widths(columns: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Returns the natural widths of columns, with the widest ones narrowed until a line fits."""
    widths = [max(map(len, column)) for column in columns]
    least = [_least(column) for column in columns]
    while width is not None and _total(widths) > width:
        shrinkable = [index for index, size in enumerate(widths) if size > least[index]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda index: widths[index])] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _least(column: Sequence[str]) -> int:
    """Returns the minimum width of a column. Numbers are not broken; text wraps between words."""
    return max(
        len(cell) if _is_number(cell) else min(_LONGEST_WORD, max(map(len, cell.split()), default=0)) for cell in column
    )


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    return [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    ]


def _is_right(column: Sequence[str]) -> bool:
    return len(column) > 1 and all(_is_number(cell) for cell in column[1:])


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
