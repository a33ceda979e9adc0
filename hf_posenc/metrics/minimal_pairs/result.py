"""How often a model prefers the right text, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.metrics.in_turn import UnderScheme, footnoted
from hf_posenc.metrics.intervals import wilson_interval
from hf_posenc.metrics.naming import first_row
from hf_posenc.tables import format_table

#: The group that every pair is counted in.
ALL = "all"


@dataclass(frozen=True)
class ConditionAccuracy:
    """The pairs of one condition.

    Args:
        condition: its name; `"all"` for every pair.
        pairs: how many there are.
        right: in how many of them the right text is more likely. Equally likely is not right.
        ties: in how many both are exactly equally likely.
    """

    condition: str
    pairs: int
    right: int
    ties: int

    @property
    def accuracy(self) -> float:
        """The fraction that is right; 0.5 by chance."""
        return self.right / self.pairs

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the accuracy."""
        return wilson_interval(self.right, self.pairs)


@dataclass(frozen=True)
class MinimalPairsResult:
    """Minimal pairs of one task under one or several position encodings.

    Args:
        model: name of the model's class.
        task: name of the task.
        scoring: `"causal"` or `"masked"`.
        pairs: how many were scored.
        of: how many the task has.
        seed: of the choice of pairs, and of new weights of a scheme.
        rows: one per position encoding; the value of each is one `ConditionAccuracy` per condition.
        notes: what holds for all rows.
    """

    model: str
    task: str
    scoring: str
    pairs: int
    of: int
    seed: int
    rows: tuple[UnderScheme[tuple[ConditionAccuracy, ...]], ...]
    notes: tuple[str, ...] = ()

    def row(self, scheme: str) -> UnderScheme[tuple[ConditionAccuracy, ...]]:
        """The row of one scheme.

        Raises:
            KeyError: if there is none.
        """
        return first_row(self.rows, scheme, "minimal pairs result")

    def condition(self, scheme: str, condition: str = ALL) -> ConditionAccuracy:
        """One condition of one scheme.

        Raises:
            KeyError: if there is none, or nothing could be measured.
        """
        row = self.row(scheme)
        for found in row.value or ():
            if found.condition == condition:
                return found
        raise KeyError(
            f"No condition {condition!r} of {scheme!r}; there are {[item.condition for item in row.value or ()]}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field, and for each condition its accuracy and interval."""
        entry = asdict(self)
        for row, row_entry in zip(self.rows, entry["rows"], strict=True):
            for found, found_entry in zip(row.value or (), row_entry["value"] or (), strict=True):
                found_entry |= {"accuracy": found.accuracy, "interval": found.interval}
        return entry

    def table(self, *, markdown: bool = False) -> str:
        """One line per scheme and condition, then the notes.

        Args:
            markdown: as a Markdown table.
        """
        cells: list[list[str]] = []
        footnotes: list[str] = []
        for row, (label, notes) in zip(self.rows, footnoted(self.rows), strict=True):
            footnotes += notes
            if row.value is None:
                cells.append([label, "-", "-", "-", "-", "-"])
            for found in row.value or ():
                low, high = found.interval
                numbers = [str(found.pairs), f"{found.accuracy:.3f}", f"{low:.3f} to {high:.3f}", str(found.ties)]
                cells.append([label, found.condition, *numbers])
        headers = ["scheme", "condition", "pairs", "accuracy", "95 % interval", "ties"]
        chosen = f"{self.pairs} of {self.of} pairs, seed {self.seed}" if self.pairs < self.of else f"{self.of} pairs"
        paragraphs = [
            f"{self.model}, minimal pairs {self.task!r} ({self.scoring} scoring, {chosen}); chance is 0.5",
            format_table(headers, cells, markdown=markdown),
            *self.notes,
            *footnotes,
        ]
        return "\n\n".join(paragraphs[:2]) + "".join(("\n\n" if markdown else "\n") + note for note in paragraphs[2:])
