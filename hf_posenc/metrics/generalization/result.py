"""What a test of length generalisation found, as data."""

from __future__ import annotations

from dataclasses import dataclass


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
