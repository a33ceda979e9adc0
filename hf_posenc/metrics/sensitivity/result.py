"""What the sensitivity test found, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.metrics.in_turn import UnderScheme, footnoted
from hf_posenc.metrics.naming import first_row
from hf_posenc.metrics.sensitivity.permuted_context import PermutedContext
from hf_posenc.metrics.sensitivity.repeated_words import RepeatedWords
from hf_posenc.metrics.sensitivity.role_swaps import RoleSwaps
from hf_posenc.metrics.sensitivity.shifted_positions import ShiftedPositions
from hf_posenc.tables import format_number, format_table

_CAUSAL_NOTE = (
    "The model is causal: its mask shows every token another prefix, so it sees order without positions too. Read each "
    "number beside that of 'none'."
)
_ENCODER_NOTE = (
    "The model sees both sides: without position information all but the shifts is 0 up to {tolerance} (rounding)."
)
_SHOWN_GAPS = 4


@dataclass(frozen=True)
class PositionSensitivity:
    """The four measurements of one scheme.

    Args:
        repeated: the two states of a repeated word.
        roles: subject and object exchanged.
        permuted: a shuffled context.
        shifted: positions that start elsewhere.
    """

    repeated: RepeatedWords
    roles: RoleSwaps
    permuted: PermutedContext
    shifted: ShiftedPositions

    def largest(self) -> float:
        """The largest of all numbers that are 0 for a model that sees a set of tokens."""
        found = [distance for layers in self.repeated.distances for distance in layers]
        found += [*self.roles.word, *self.roles.sentence]
        found += [permutation.output_change for permutation in self.permuted.permutations]
        return max(found)


@dataclass(frozen=True)
class SensitivityResult:
    """Position sensitivity of one model under several schemes.

    Args:
        model: name of the model's class.
        causal: whether a token sees only those before it, as measured.
        tolerance: up to this a number is rounding in the model's dtype.
        rows: one per scheme; `value` is its `PositionSensitivity`.
    """

    model: str
    causal: bool
    tolerance: float
    rows: tuple[UnderScheme[PositionSensitivity], ...]

    def row(self, scheme: str) -> UnderScheme[PositionSensitivity]:
        """The row of one scheme.

        Raises:
            KeyError: if it was not measured.
        """
        return first_row(self.rows, scheme, "result")

    def sees_order(self, scheme: str) -> bool | None:
        """Whether positions make a difference to an encoder; `None` for a causal model, which its mask tells too.

        Raises:
            KeyError: if the scheme was not measured.
        """
        value = self.row(scheme).value
        return None if self.causal or value is None else value.largest() > self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field."""
        return asdict(self)

    def table(self, *, markdown: bool = False) -> str:
        """One row per scheme: the last layer's distances, the changes of outputs and losses; then the notes.

        Args:
            markdown: as a Markdown table.
        """
        first = next((row.value for row in self.rows if row.value is not None), None)
        labels, notes = [], []
        for label, new in footnoted(self.rows):
            labels.append(label)
            notes += new
        headers = ["scheme", *([] if first is None else self._headers(first))]
        cells = [
            [label, *(["-"] * (len(headers) - 1) if row.value is None else self._cells(row.value))]
            for label, row in zip(labels, self.rows, strict=True)
        ]
        notes += [f"{row.label}, {reason}" for row in self.rows if row.value for reason in _reasons(row.value)]
        paragraphs = [
            f"{self.model}: relative changes of states and outputs",
            format_table(headers, cells, markdown=markdown),
            *([] if first is None else [_explanation(first, causal=self.causal)]),
            _CAUSAL_NOTE if self.causal else _ENCODER_NOTE.format(tolerance=format_number(self.tolerance)),
            *notes,
        ]
        return "\n\n".join(paragraphs)

    def _headers(self, value: PositionSensitivity) -> list[str]:
        permuted = []
        for permutation in value.permuted.permutations:
            name = "shuffled" if permutation.within is None else f"in {permutation.within}s"
            permuted += [name] if permutation.loss_change is None else [name, f"{name}: loss"]
        return [
            *(f"gap {gap}" for gap in _shown(value.repeated.gaps)),
            "word's role",
            "roles",
            *permuted,
            *(f"+{shift.offset}" if shift.offset else "left pad" for shift in value.shifted.shifts),
        ]

    def _cells(self, value: PositionSensitivity) -> list[str]:
        numbers: list[float | None] = [value.repeated.at(gap) for gap in _shown(value.repeated.gaps)]
        numbers += [value.roles.word[-1], value.roles.sentence[-1]]
        for permutation in value.permuted.permutations:
            numbers += [permutation.output_change]
            numbers += [] if permutation.loss_change is None else [permutation.loss_change]
        numbers += [shift.change for shift in value.shifted.shifts]
        return [format_number(number) for number in numbers]


def _shown(gaps: tuple[int, ...]) -> list[int]:
    """At most four gaps, evenly spread."""
    if len(gaps) <= _SHOWN_GAPS:
        return list(gaps)
    steps = _SHOWN_GAPS - 1
    return [gaps[round(step * (len(gaps) - 1) / steps)] for step in range(_SHOWN_GAPS)]


def _explanation(value: PositionSensitivity, *, causal: bool) -> str:
    permuted = value.permuted
    whole = "the state of its last word" if causal else "the mean of its states"
    loss = "" if permuted.loss is None else f"; loss: rise of its loss in nats, from a mean of {permuted.loss:.2f}"
    return (
        f"gap: distance of the two states of {value.repeated.nouns} repeated nouns, that many tokens apart. Roles: "
        f"{value.roles.pairs} sentences with subject and object exchanged, the word's own state and {whole}. Shuffled: "
        f"change of the output at the last of {permuted.context + 1} tokens when those before it are shuffled, all or "
        f"in blocks, in {permuted.windows} windows{loss}. +n: change of all outputs when n is added to every position, "
        f"and left pad: when padding stands before the text."
    )


def _reasons(value: PositionSensitivity) -> list[str]:
    gaps = zip(value.repeated.gaps, value.repeated.reasons, strict=True)
    found = [f"gap {gap}: {reason}" for gap, reason in gaps if reason is not None]
    return found + [f"+{shift.offset}: {shift.reason}" for shift in value.shifted.shifts if shift.reason is not None]
