"""Plain text tables for results; `markdown` ones paste into a document."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Aligned columns, left for text and right for numbers.

    Args:
        headers: one name per column.
        rows: cells as text, one sequence per row.
        markdown: with pipes and a rule, as GitHub renders them.

    Raises:
        ValueError: if a row has another number of cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"A row has {len(row)} cells for {len(headers)} columns: {list(row)}.")
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [len(column) > 1 and all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        ]
        return "| " + " | ".join(padded) + " |" if markdown else "  ".join(padded).rstrip()

    rule = ["-" * (width - 1) + ":" if is_right else "-" * width for width, is_right in zip(widths, right, strict=True)]
    separator = [line(rule)] if markdown else [line(["-" * width for width in widths])]
    return "\n".join([line(headers), *separator, *(line(row) for row in rows)])


def format_number(value: float | None) -> str:
    """Three significant digits, an exact zero as `0`, a missing value as `-`."""
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
