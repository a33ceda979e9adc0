"""Results of evaluations, as records with the same fields for every evaluation."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.installation import require
from hf_posenc.report.page import marked_up
from hf_posenc.report.tables import FORMATS, Form, format_table

if TYPE_CHECKING:
    import pandas
    from pydantic import ValidationError


FORMAT = 1
#: How pydantic reads a result and the classes inside it.
_STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class Quantity:
    """A kind of number that an evaluation measures.

    Args:
        name: its name in records.
        heading: the heading of its columns, a format string with keys of `Record.at`, such as `"layer {layer}"`.
        meaning: one sentence for a reader of the table.
        style: how a value is written: "number" (three significant digits), "signed" (the same with its sign), "loss"
            (four digits), "fraction" (three decimals), "difference" (three decimals with their sign), "percent" (of a
            fraction), "percent_tenths" (the same with one decimal), "tenths" (one decimal), "milliseconds" (of
            seconds), "count", "text", or "verdict" (yes or no, then the number).
    """

    name: str
    heading: str
    meaning: str = ""
    style: str = "number"

    def __post_init__(self) -> None:
        if self.style not in FORMATS:
            raise ValueError(
                f"The style of the quantity {self.name!r} is {self.style!r}; expected one of {[*FORMATS]}."
            )


@dataclass(frozen=True)
class Subject:
    """What was measured: a model with one position encoding.

    Args:
        label: the scheme with the options that differ from their defaults. Unique in a result.
        scheme: the name of the scheme; `"native"` for that of the stock model.
        config: its options (`SchemeConfig.to_dict`); `None` if they are unknown.
        notes: what a reader has to know to interpret the numbers.
        error: why nothing could be measured, or `None`.
    """

    label: str
    scheme: str
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Record:
    """One number.

    Args:
        subject: label of the `Subject`.
        quantity: name of the `Quantity`.
        value: the number; `None` if there is none, or if only `passed` is known.
        at: where it was measured, such as `{"layer": 3}` or `{"length": 512}`.
        low: lower end of its 95 % confidence interval, if it has one.
        high: upper end of the interval.
        count: the number of values that it is the mean of, if known.
        passed: the verdict, if there is one.
        note: why there is no number, or what a reader has to know.
        shown: what a table shows instead of the value.
        details: further data, such as the threshold of a verdict. JSON-ready.
    """

    subject: str
    quantity: str
    value: float | None = None
    at: Mapping[str, Any] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    count: int | None = None
    passed: bool | None = None
    note: str = ""
    shown: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def joined(parts: Iterable[tuple[Subject, Sequence[Record]]]) -> tuple[tuple[Subject, ...], tuple[Record, ...]]:
    """Returns subjects and all their records, each with the label of its subject.

    A label does not name every option, so a label that repeats gets a number.
    """
    counts: dict[str, int] = {}
    subjects: list[Subject] = []
    records: list[Record] = []
    for subject, measured in parts:
        counts[subject.label] = counts.get(subject.label, 0) + 1
        label = subject.label if counts[subject.label] == 1 else f"{subject.label} #{counts[subject.label]}"
        subjects.append(replace(subject, label=label))
        records += [replace(record, subject=label) for record in measured]
    return tuple(subjects), tuple(records)


@dataclass(frozen=True)
class View:
    """One table of a result.

    A column whose numbers have confidence intervals is followed by one that shows them, unless `half_widths` asks for
    `1.48 ± 0.04`.

    Args:
        quantities: names, in the order of the columns.
        title: a line above the table.
        rows: keys of `Record.at` that make rows, in addition to the subject. All other keys make columns.
        shown: the values to show for a key of `Record.at`; all if the key is missing.
        order: a quantity. Subjects are sorted by its value in the last column, lowest first, and those without a value
            are left out. If it is empty, all subjects are shown in the order of the result.
        half_widths: whether to write an interval after its number, as ± half of its width.
    """

    quantities: tuple[str, ...]
    title: str = ""
    rows: tuple[str, ...] = ()
    shown: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    order: str = ""
    half_widths: bool = False


@dataclass(frozen=True)
class Result:
    """Everything that one evaluation measured, and how.

    Args:
        task: name of the evaluation.
        title: one line above its tables.
        quantities: the kinds of its numbers.
        subjects: what was measured, in the order of the rows.
        records: the numbers.
        views: the tables; the first is the main one.
        settings: how it was measured: the name of the model (`model`), settings that only apply to it (`of_model`),
            options, data and seed. JSON-ready.
        remarks: sentences that apply to all rows.
    """

    __pydantic_config__ = _STRICT

    task: str
    title: str
    quantities: tuple[Quantity, ...]
    subjects: tuple[Subject, ...]
    records: tuple[Record, ...]
    views: tuple[View, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"Records refer to their subject by its label, but labels repeat: {self.labels}.")

    def subject(self, scheme: str) -> Subject:
        """Returns the first subject with this label, or otherwise the first with this scheme.

        Raises:
            KeyError: if there is none.
        """
        for attribute in ("label", "scheme"):
            for subject in self.subjects:
                if getattr(subject, attribute) == scheme:
                    return subject
        raise KeyError(f"{scheme!r} was not measured; the {self.task} result covers {self.labels}.")

    @property
    def labels(self) -> list[str]:
        """The labels of all subjects, in order."""
        return [subject.label for subject in self.subjects]

    def of(self, scheme: str | None = None, quantity: str | None = None, **at: Any) -> Iterator[Record]:
        """Yields the records that match.

        Args:
            scheme: label or name of a subject; `None` for all.
            quantity: name of a quantity; `None` for all.
            **at: values that `Record.at` must have.

        Raises:
            KeyError: if the subject was not measured.
        """
        label = None if scheme is None else self.subject(scheme).label
        for record in self.records:
            if label not in (None, record.subject) or quantity not in (None, record.quantity):
                continue
            if all(key in record.at and record.at[key] == value for key, value in at.items()):
                yield record

    def record(self, scheme: str, quantity: str, **at: Any) -> Record:
        """Returns the only record that matches.

        Raises:
            KeyError: if there is none, or several.
        """
        matching = list(self.of(scheme, quantity, **at))
        if len(matching) == 1:
            return matching[0]
        known = [f"{record.quantity} {dict(record.at)}" for record in self.of(scheme)]
        raise KeyError(f"{len(matching)} records of {scheme!r} match {quantity!r} at {at}; it has {known}.")

    def value(self, scheme: str, quantity: str, **at: Any) -> float | None:
        """Returns the value of the only record that matches, see `record`."""
        return self.record(scheme, quantity, **at).value

    def frame(self) -> pandas.DataFrame:
        """Returns one row per record, with columns for its scheme and for each key of `at`. Needs pandas."""
        require("A data frame", "pandas")
        import pandas

        schemes = {subject.label: subject.scheme for subject in self.subjects}
        rows = [asdict(record) for record in self.records]
        flat = ({"task": self.task, "scheme": schemes[row["subject"]]} | row.pop("at") | row for row in rows)
        return pandas.DataFrame(flat)

    def table(self, *, markdown: bool = False) -> str:
        """Returns the result as readable text, with plain or Markdown tables."""
        return rendered(self, "markdown" if markdown else "text")

    def html(self) -> str:
        """Returns the result as HTML: headings, tables and paragraphs. Needs pandas."""
        return rendered(self, "html")

    def __str__(self) -> str:
        return self.table()

    def _repr_markdown_(self) -> str:
        """Returns what Jupyter shows for a result."""
        return self.table(markdown=True)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready dictionary. Empty fields of records are left out."""
        entry = {"format": FORMAT} | asdict(self)
        entry["records"] = [
            {key: value for key, value in record.items() if value not in (None, "", {})} for record in entry["records"]
        ]
        return entry

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Result:
        """Returns the result that `to_dict` was called on. Needs pydantic.

        Raises:
            ValueError: if it has another format, or a value that does not fit. The message names the key.
        """
        version = entry.get("format") if isinstance(entry, Mapping) else None
        if version != FORMAT:
            raise ValueError(f"Not a result of this version: 'format' is {reprlib.repr(version)}; expected {FORMAT}.")
        require("A file with results", "pydantic")
        from pydantic import TypeAdapter, ValidationError

        text = json.dumps({key: value for key, value in entry.items() if key != "format"})
        try:
            result = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ValueError(f"{described(error)}.") from error
        _check_references(result)
        return result

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Reads what `save` wrote. Needs pydantic.

        Raises:
            ValueError: as in `from_dict`, and if the file is not JSON.
        """
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def described(error: ValidationError, prefix: str = "") -> str:
    """Returns the first problem that pydantic found, without a period. Keys have the prefix."""
    problem = error.errors(include_url=False)[0]
    place = prefix + ".".join(map(str, problem["loc"])) if problem["loc"] else ""
    fact = f"{place or 'The whole'} is {reprlib.repr(problem['input'])}"
    said = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if problem["type"] == "missing":
        return f"{place} is missing; expected a value"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{place} is not a known key"
    if problem["type"] == "value_error":
        # The message of a check on several values names them.
        where = place if isinstance(problem["input"], dict) else fact
        return f"{where}: {said}" if place else said
    return f"{fact}; {said if 'expected' in said else f'expected: {said}'}"


def _check_references(result: Result) -> None:
    """Raises `ValueError` for a name that nothing has, and for places that the tables cannot show."""
    headings = {quantity.name: quantity.heading for quantity in result.quantities}
    kinds: dict[str, Any] = {}

    def check(place: str, name: str, known: Iterable[str]) -> None:
        if name not in known:
            raise _wrong(place, name, f"one of {', '.join(known)}")

    for number, record in enumerate(result.records):
        place = f"records.{number}"
        check(f"{place}.subject", record.subject, result.labels)
        check(f"{place}.quantity", record.quantity, headings)
        for key, value in record.at.items():
            kind = kinds.setdefault(key, str if isinstance(value, str) else int | float)
            if not isinstance(value, kind):
                raise _wrong(f"{place}.at.{key}", value, f"{'text' if kind is str else 'a number'}, as elsewhere")
        try:
            headings[record.quantity].format(**record.at)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise _wrong(f"{place}.at", record.at, f"the keys of {headings[record.quantity]!r}") from error
    for number, view in enumerate(result.views):
        for name in view.quantities:
            check(f"views.{number}.quantities", name, headings)
        for key, values in view.shown.items():
            if wrong := [value for value in values if not isinstance(value, str | int | float)]:
                raise _wrong(f"views.{number}.shown.{key}", wrong[0], "text or a number")
    settings = {"model": (str, "text"), "of_model": (dict, "named values"), "models": (dict, "named values")}
    for key, (type_, expected) in settings.items():
        if not isinstance(value := result.settings.get(key), type_ | None):
            raise _wrong(f"settings.{key}", value, expected)
    path = (result.settings.get("of_model") or {}).get("path")
    if not isinstance(path, str | None):
        raise _wrong("settings.of_model.path", path, "text")


def _wrong(place: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{place} is {reprlib.repr(value)}; expected {expected}.")


_MISSING = "-"


def rendered(result: Result, form: Form) -> str:
    """Returns the title, a table for each view with the meanings of its columns, remarks and footnotes."""
    footnotes: dict[str, int] = {}
    quantities = {quantity.name: quantity for quantity in result.quantities}
    tables = [_table(result, view, quantities, footnotes) for view in result.views]
    notes = [*result.remarks, *(f"[{number}] {note}" for note, number in footnotes.items())]
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


def _table(
    result: Result, view: View, quantities: dict[str, Quantity], footnotes: dict[str, int]
) -> tuple[list[str], list[list[str]]]:
    measured, shown = [each for each in result.records if each.quantity in view.quantities], view.shown.items()
    records = [each for each in measured if all(each.at[key] in values for key, values in shown if key in each.at)]

    def heading(record: Record) -> tuple[str, str]:
        return record.quantity, quantities[record.quantity].heading.format(**record.at)

    def place(record: Record) -> tuple[Any, ...]:
        return tuple(record.at.get(key, _MISSING) for key in view.rows)

    def marked(text: str, notes: Sequence[str]) -> str:
        """Adds a number for each note. Notes are numbered in the order in which they first appear."""
        return " ".join([text, *(f"[{footnotes.setdefault(note, len(footnotes) + 1)}]" for note in notes if note)])

    columns = sorted(dict.fromkeys(map(heading, records)), key=lambda column: view.quantities.index(column[0]))
    with_interval = {heading(record) for record in records if record.low is not None and not view.half_widths}
    rows = []
    for subject in _ordered(result.subjects, records, view):
        measured = [record for record in records if record.subject == subject.label]
        error = f"cannot be measured: {subject.error}" if subject.error else ""
        for here in dict.fromkeys(map(place, measured)) or [(_MISSING,) * len(view.rows)]:
            by_column = {heading(record): record for record in measured if place(record) == here}
            cells = [marked(subject.label, (error, *subject.notes)), *map(str, here)]
            for column in columns:
                record = by_column.get(column)
                cells.append(_MISSING)
                if record is not None:
                    value = format_value(record, quantities[column[0]], half_width=view.half_widths)
                    cells[-1] = marked(value, [record.note])
                if column in with_interval:
                    known = record is not None and record.low is not None and record.high is not None
                    cells.append(f"{record.low:.3f} to {record.high:.3f}" if record and known else _MISSING)
            rows.append(cells)
    headers = ["model" if "models" in result.settings else "scheme", *view.rows]
    for column in columns:
        headers += [column[1], "95 % interval"] if column in with_interval else [column[1]]
    return headers, rows


def _ordered(subjects: Sequence[Subject], records: Sequence[Record], view: View) -> Sequence[Subject]:
    if not view.order:
        return subjects
    # The last record of a subject is in the last column.
    values = {row.subject: row.value for row in records if row.quantity == view.order and row.value is not None}
    measured = (subject for subject in subjects if subject.label in values)
    return sorted(measured, key=lambda subject: values[subject.label])


def format_value(record: Record, quantity: Quantity, *, half_width: bool = False) -> str:
    """Returns the value of a record in the style of its quantity; `-` if it has none."""
    write = FORMATS[quantity.style]
    text = record.shown or (_MISSING if record.value is None else write(record.value))
    if half_width and record.high is not None and record.low is not None and not record.shown:
        text += f" ± {write((record.high - record.low) / 2).removeprefix('+')}"
    if quantity.style != "verdict":
        return text
    verdict = {True: "yes", False: "no", None: _MISSING}[record.passed]
    return verdict if text == _MISSING else f"{verdict} {text}"
