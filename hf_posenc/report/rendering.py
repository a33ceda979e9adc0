"""A result as text: its tables with footnotes, and what the columns mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from hf_posenc.report.records import Quantity, Record, Result, Subject, View
from hf_posenc.report.tables import Form, format_number, format_table

_MISSING = "-"


class _Footnotes:
    """Numbers notes in the order of their first mark."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def mark(self, note: str) -> str:
        if note not in self.notes:
            self.notes.append(note)
        return f"[{self.notes.index(note) + 1}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {note}" for number, note in enumerate(self.notes, start=1)]


def rendered(result: Result, form: Form) -> str:
    """The title, a table for each view, the meaning of the columns, remarks and footnotes."""
    tables, notes = table_cells(result)
    parts = [("h1", result.title)] if result.title else []
    for view, (headers, rows) in zip(result.views, tables, strict=True):
        parts += [("h2", view.title)] if view.title else []
        parts.append(("table", format_table(headers, rows, form=form)))
    if form == "html":
        parts += [("p", note) for note in notes]
        return "\n".join(text if tag == "table" else f"<{tag}>{escape(text)}</{tag}>" for tag, text in parts)
    paragraphs = [f"{text}:" if tag == "h2" else text for tag, text in parts]
    if notes:
        paragraphs.append(("\n\n" if form == "markdown" else "\n").join(notes))
    return "\n\n".join(paragraphs)


def table_cells(result: Result) -> tuple[list[tuple[list[str], list[list[str]]]], list[str]]:
    """The headers and rows of the table of each view, and the notes below all of them, as text."""
    footnotes = _Footnotes()
    quantities = {quantity.name: quantity for quantity in result.quantities}
    tables = [_table(result, view, quantities, footnotes) for view in result.views]
    named = dict.fromkeys(name for view in result.views for name in view.quantities)
    meanings = [quantities[name].meaning for name in named if quantities[name].meaning]
    return tables, [*meanings, *result.remarks, *footnotes.lines()]


def _table(
    result: Result, view: View, quantities: dict[str, Quantity], footnotes: _Footnotes
) -> tuple[list[str], list[list[str]]]:
    records = [record for record in result.records if record.quantity in view.quantities and _is_shown(record, view)]

    def heading(record: Record) -> tuple[str, str]:
        return record.quantity, quantities[record.quantity].heading.format(**record.at)

    columns = [
        column for name in view.quantities for column in dict.fromkeys(map(heading, records)) if column[0] == name
    ]
    with_interval = {heading(record) for record in records if record.low is not None and not view.half_widths}
    rows = []
    for subject in _ordered(result.subjects, records, view):
        own = [record for record in records if record.subject == subject.label]
        for place in dict.fromkeys(_row(record, view) for record in own) or [(_MISSING,) * len(view.rows)]:
            here = {heading(record): record for record in own if _row(record, view) == place}
            cells = [_label(subject, footnotes), *map(str, place)]
            for column in columns:
                record = here.get(column)
                cells.append(_cell(record, quantities[column[0]], footnotes, view))
                cells += [_interval(record)] if column in with_interval else []
            rows.append(cells)
    headers = ["scheme", *view.rows]
    for column in columns:
        headers += [column[1], "95 % interval"] if column in with_interval else [column[1]]
    return headers, rows


def _ordered(subjects: Sequence[Subject], records: Sequence[Record], view: View) -> Sequence[Subject]:
    if not view.order:
        return subjects
    # The last column is the last of the records.
    values = {one.subject: one.value for one in records if one.quantity == view.order and one.value is not None}
    return sorted((one for one in subjects if one.label in values), key=lambda one: values[one.label])


def _is_shown(record: Record, view: View) -> bool:
    return all(record.at[key] in values for key, values in view.shown.items() if key in record.at)


def _row(record: Record, view: View) -> tuple[Any, ...]:
    return tuple(record.at.get(key, _MISSING) for key in view.rows)


def _label(subject: Subject, footnotes: _Footnotes) -> str:
    notes = [*([f"cannot be measured: {subject.error}"] if subject.error else []), *subject.notes]
    return " ".join([subject.label, *map(footnotes.mark, notes)])


def _cell(record: Record | None, quantity: Quantity, footnotes: _Footnotes, view: View) -> str:
    if record is None:
        return _MISSING
    text = format_value(record, quantity)
    if view.half_widths and record.high is not None and record.low is not None and not record.shown:
        text += f" ± {_FORMATS[quantity.style]((record.high - record.low) / 2).removeprefix('+')}"
    return f"{text} {footnotes.mark(record.note)}" if record.note else text


def _interval(record: Record | None) -> str:
    if record is None or record.low is None or record.high is None:
        return _MISSING
    return f"{record.low:.3f} to {record.high:.3f}"


def format_value(record: Record, quantity: Quantity) -> str:
    """The value of a record in the style of its quantity; `-` if it has none."""
    text = record.shown or (_MISSING if record.value is None else _FORMATS[quantity.style](record.value))
    if quantity.style != "verdict":
        return text
    verdict = {True: "yes", False: "no", None: _MISSING}[record.passed]
    return verdict if text == _MISSING else f"{verdict} {text}"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + format_number(value)


def _decimals(digits: int, value: float) -> str:
    # Adding zero turns the negative zero that rounding leaves into a plain one.
    return f"{round(value, digits) + 0.0:.{digits}f}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "number": format_number,
    "signed": _signed,
    "loss": "{:.4g}".format,
    "fraction": partial(_decimals, 3),
    "difference": lambda value: ("+" if round(value, 3) > 0 else "") + _decimals(3, value),
    "percent": lambda value: _decimals(0, 100 * value),
    "tenths": partial(_decimals, 1),
    "milliseconds": lambda value: _decimals(1, 1000 * value),
    "count": "{:.0f}".format,
    "text": str,
    "verdict": format_number,
}
