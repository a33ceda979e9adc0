"""What an evaluation measured: rows of one form, whatever was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.report.rendering import rendered
from hf_posenc.report.tables import FORMATS, Form

if TYPE_CHECKING:
    import pandas

FORMAT = 1


@dataclass(frozen=True)
class Quantity:
    """What one kind of number is.

    Args:
        name: in records.
        heading: of its columns, a format string of what `Record.at` holds: `"layer {layer}"`.
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
            raise ValueError(f"The style of the quantity {self.name!r} is {self.style!r}; it is one of {[*FORMATS]}.")


@dataclass(frozen=True)
class Subject:
    """What was measured: a model under one position encoding.

    Args:
        label: the scheme with the options that are not its defaults. Unique in a result.
        scheme: its name; `"native"` for what the stock model has.
        config: its options (`SchemeConfig.to_dict`); `None` where they are not known.
        notes: what a reader has to know to read the numbers.
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
        count: how many things the number is a mean of, if that is known.
        passed: the verdict, where there is one.
        note: why there is no number, or what a reader has to know.
        shown: what a table shows in place of the value.
        details: further numbers and words, such as the threshold of a verdict. JSON-ready.
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
    """Subjects and all their records, each with the label of its subject.

    A label does not name every option: one that has come before gets a number.
    """
    counts: dict[str, int] = {}
    subjects: list[Subject] = []
    records: list[Record] = []
    for subject, own in parts:
        counts[subject.label] = counts.get(subject.label, 0) + 1
        label = subject.label if counts[subject.label] == 1 else f"{subject.label} #{counts[subject.label]}"
        subjects.append(replace(subject, label=label))
        records += [replace(record, subject=label) for record in own]
    return tuple(subjects), tuple(records)


@dataclass(frozen=True)
class View:
    """One table of a result.

    A column whose numbers have confidence intervals is followed by one that shows them, unless `half_widths` asks for
    `1.48 ± 0.04`.

    Args:
        quantities: names, in the order of the columns.
        title: a line above the table.
        rows: keys of `Record.at` that make rows, beside the subject. All other keys make columns.
        shown: for a key of `Record.at`, the values that are shown; all if the key is missing.
        order: a quantity. Subjects ascend by its value in the last column, and those without one are left out; without
            an order all subjects stand as they do in the result.
        half_widths: an interval stands beside its number, as ± half of its width.
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
        title: one line that heads its tables.
        quantities: what the numbers are.
        subjects: what was measured, in the order of the rows.
        records: the numbers.
        views: the tables; the first is the main one.
        settings: what was measured with: the model's class, options, data, seed. JSON-ready.
        remarks: sentences that hold for all rows.
    """

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
            raise ValueError(f"Records name their subject by its label, and labels repeat: {self.labels}.")

    def subject(self, scheme: str) -> Subject:
        """The first subject with this label, or else with this scheme.

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
        """The labels of the subjects, in order."""
        return [subject.label for subject in self.subjects]

    def of(self, scheme: str | None = None, quantity: str | None = None, **at: Any) -> Iterator[Record]:
        """The records that fit.

        Args:
            scheme: label or name of a subject; `None` for all.
            quantity: name of a quantity; `None` for all.
            **at: what `Record.at` has to hold.

        Raises:
            KeyError: for a subject that was not measured.
        """
        label = None if scheme is None else self.subject(scheme).label
        for record in self.records:
            if label not in (None, record.subject) or quantity not in (None, record.quantity):
                continue
            if all(key in record.at and record.at[key] == value for key, value in at.items()):
                yield record

    def record(self, scheme: str, quantity: str, **at: Any) -> Record:
        """The one record that fits.

        Raises:
            KeyError: if there is none, or several.
        """
        found = list(self.of(scheme, quantity, **at))
        if len(found) == 1:
            return found[0]
        known = [f"{record.quantity} {dict(record.at)}" for record in self.of(scheme)]
        raise KeyError(f"{len(found)} records of {scheme!r} are {quantity!r} at {at}; it has {known}.")

    def value(self, scheme: str, quantity: str, **at: Any) -> float | None:
        """The value of `record`."""
        return self.record(scheme, quantity, **at).value

    def frame(self) -> pandas.DataFrame:
        """One row per record, with columns for its scheme and for each key of `at`. Needs pandas."""
        import pandas

        schemes = {subject.label: subject.scheme for subject in self.subjects}
        rows = [asdict(record) for record in self.records]
        return pandas.DataFrame(
            {"task": self.task, "scheme": schemes[row["subject"]]} | row.pop("at") | row for row in rows
        )

    def table(self, *, markdown: bool = False) -> str:
        """The result for a reader, as plain text or with Markdown tables."""
        return self._rendered("markdown" if markdown else "text")

    def html(self) -> str:
        """The result for a web page: headings, tables and paragraphs. Needs pandas."""
        return self._rendered("html")

    def __str__(self) -> str:
        return self.table()

    def _repr_markdown_(self) -> str:
        """What Jupyter shows of a result."""
        return self.table(markdown=True)

    def _rendered(self, form: Form) -> str:
        return rendered(self, form)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; fields of a record that say nothing are left out."""
        entry = {"format": FORMAT} | asdict(self)
        entry["records"] = [
            {key: value for key, value in record.items() if value not in (None, "", {})} for record in entry["records"]
        ]
        return entry

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Result:
        """What `to_dict` wrote.

        Raises:
            ValueError: for another format.
        """
        found = entry.get("format") if isinstance(entry, Mapping) else None
        if found != FORMAT:
            raise ValueError(f"Not a result of this version: 'format' is {found!r}, not {FORMAT}.")
        return cls(
            task=entry["task"],
            title=entry["title"],
            quantities=tuple(Quantity(**one) for one in entry["quantities"]),
            subjects=tuple(Subject(**one | {"notes": tuple(one["notes"])}) for one in entry["subjects"]),
            records=tuple(Record(**one) for one in entry["records"]),
            views=tuple(
                View(**one | {key: tuple(one[key]) for key in ("quantities", "rows")}) for one in entry["views"]
            ),
            settings=entry["settings"],
            remarks=tuple(entry["remarks"]),
        )

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Reads what `save` wrote.

        Raises:
            ValueError: for a file of another format.
        """
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
