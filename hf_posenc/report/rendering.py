"""A result as text: its tables with footnotes, and what the columns mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.report.page import marked_up
from hf_posenc.report.tables import FORMATS, Form, format_table

if TYPE_CHECKING:
    from hf_posenc.report.records import Quantity, Record, Result, Subject, View

_MISSING = "-"


def rendered(result: Result, form: Form) -> str:
    """The title, a table for each view with the meaning of its columns, remarks and footnotes."""
    tables, notes = table_cells(result)
    told: set[str] = set()
    meanings = {quantity.name: quantity.meaning for quantity in result.quantities if quantity.meaning}
    parts = [("h1", result.title)] if result.title else []
    for view, (headers, rows) in zip(result.views, tables, strict=True):
        parts += [("h2", view.title)] if view.title else []
        parts.append(("table", format_table(headers, rows, form=form)))
        new = [meanings[name] for name in view.quantities if name in meanings and name not in told]
        told.update(view.quantities)
        parts += [("p", meaning) for meaning in dict.fromkeys(new)]
    if form == "html":
        parts += [("p", note) for note in notes]
        written = {"table": '<div class="table">{}</div>'.format, "p": '<p class="note">{}</p>'.format}
        return "\n".join(
            written.get(tag, f"<{tag}>{{}}</{tag}>".format)(text if tag == "table" else marked_up(text))
            for tag, text in parts
        )
    paragraphs = [f"{text}:" if tag == "h2" else text for tag, text in parts]
    if notes:
        paragraphs.append(("\n\n" if form == "markdown" else "\n").join(notes))
    return "\n\n".join(paragraphs)


def table_cells(result: Result) -> tuple[list[tuple[list[str], list[list[str]]]], list[str]]:
    """The headers and rows of the table of each view, and the remarks and footnotes below all of them, as text."""
    footnotes: dict[str, int] = {}
    quantities = {quantity.name: quantity for quantity in result.quantities}
    tables = [_table(result, view, quantities, footnotes) for view in result.views]
    numbered = [f"[{number}] {note}" for note, number in footnotes.items()]
    return tables, [*result.remarks, *numbered]


def _table(
    result: Result, view: View, quantities: dict[str, Quantity], footnotes: dict[str, int]
) -> tuple[list[str], list[list[str]]]:
    records = [
        record
        for record in result.records
        if record.quantity in view.quantities
        and all(record.at[key] in values for key, values in view.shown.items() if key in record.at)
    ]

    def heading(record: Record) -> tuple[str, str]:
        return record.quantity, quantities[record.quantity].heading.format(**record.at)

    def place(record: Record) -> tuple[Any, ...]:
        return tuple(record.at.get(key, _MISSING) for key in view.rows)

    def marked(text: str, notes: Sequence[str]) -> str:
        """With a number for each note, in the order of their first mark."""
        return " ".join([text, *(f"[{footnotes.setdefault(note, len(footnotes) + 1)}]" for note in notes if note)])

    columns = sorted(dict.fromkeys(map(heading, records)), key=lambda column: view.quantities.index(column[0]))
    with_interval = {heading(record) for record in records if record.low is not None and not view.half_widths}
    rows = []
    for subject in _ordered(result.subjects, records, view):
        own = [record for record in records if record.subject == subject.label]
        error = f"cannot be measured: {subject.error}" if subject.error else ""
        for here in dict.fromkeys(map(place, own)) or [(_MISSING,) * len(view.rows)]:
            found = {heading(record): record for record in own if place(record) == here}
            cells = [marked(subject.label, (error, *subject.notes)), *map(str, here)]
            for column in columns:
                record = found.get(column)
                cells.append(_MISSING)
                if record is not None:
                    value = format_value(record, quantities[column[0]], half_width=view.half_widths)
                    cells[-1] = marked(value, [record.note])
                if column in with_interval:
                    known = record is not None and record.low is not None and record.high is not None
                    cells.append(f"{record.low:.3f} to {record.high:.3f}" if record and known else _MISSING)
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


def format_value(record: Record, quantity: Quantity, *, half_width: bool = False) -> str:
    """The value of a record in the style of its quantity; `-` if it has none."""
    write = FORMATS[quantity.style]
    text = record.shown or (_MISSING if record.value is None else write(record.value))
    if half_width and record.high is not None and record.low is not None and not record.shown:
        text += f" ± {write((record.high - record.low) / 2).removeprefix('+')}"
    if quantity.style != "verdict":
        return text
    verdict = {True: "yes", False: "no", None: _MISSING}[record.passed]
    return verdict if text == _MISSING else f"{verdict} {text}"
