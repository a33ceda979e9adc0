"""What a test of length generalisation found, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.tables import format_number, format_table


@dataclass(frozen=True)
class GeneralizationRow:
    """One length.

    Args:
        length: as the task counts it.
        samples: how many examples were tested.
        held_out: whether no training set of this task can hold these examples.
        exact_match: fraction of the answers that are right from the first token to the end token; `None` with a
            `reason`.
        interval: the 95 % Wilson interval of `exact_match`.
        token_accuracy: fraction of the answers' tokens, end tokens included, that follow from the right ones before
            them; `None` where it was not measured.
        reason: why there is no number.
    """

    length: int
    samples: int
    held_out: bool
    exact_match: float | None
    interval: tuple[float, float] | None
    token_accuracy: float | None
    reason: str | None = None


@dataclass(frozen=True)
class GeneralizationResult:
    """Exact match by length of one model on one task.

    Args:
        model: name of the model's class.
        scheme: its position encoding.
        task: name of the task.
        length_meaning: what a length counts.
        chance: how often a blind guess is right.
        method: `"teacher_forced"` or `"generate"`.
        seed: of the examples.
        rows: one per length, in ascending order.
        notes: what a reader has to know to read the numbers.
    """

    model: str
    scheme: str
    task: str
    length_meaning: str
    chance: float
    method: str
    seed: int
    rows: tuple[GeneralizationRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, length: int) -> GeneralizationRow:
        """The row of one length.

        Raises:
            KeyError: if the test did not include it.
        """
        for row in self.rows:
            if row.length == length:
                return row
        raise KeyError(f"No row for length {length}; the test covered {[row.length for row in self.rows]}.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field."""
        return asdict(self)

    def table(self, *, markdown: bool = False) -> str:
        """One line per length: exact match with its interval, token accuracy, number of examples.

        Args:
            markdown: as a Markdown table.
        """
        footnotes = list(dict.fromkeys(row.reason for row in self.rows if row.reason is not None))
        cells = []
        for row in self.rows:
            mark = "" if row.reason is None else f" [{footnotes.index(row.reason) + 1}]"
            interval = "-" if row.interval is None else f"{row.interval[0]:.2f} to {row.interval[1]:.2f}"
            held_out = "yes" if row.held_out else "no"
            measured = [format_number(row.exact_match) + mark, interval, format_number(row.token_accuracy)]
            cells.append([str(row.length), *measured, str(row.samples), held_out])
        headers = ["length", "exact match", "95 % interval", "token accuracy", "examples", "held out"]
        paragraphs = [
            f"{self.model} with {self.scheme}, task {self.task!r} ({self.method}, seed {self.seed})",
            format_table(headers, cells, markdown=markdown),
            f"length: {self.length_meaning}. A blind guess is right with probability {format_number(self.chance)}.",
            *self.notes,
            *(f"[{number}] no number: {reason}" for number, reason in enumerate(footnotes, start=1)),
        ]
        return "\n\n".join(paragraphs[:3]) + "".join(("\n\n" if markdown else "\n") + note for note in paragraphs[3:])
