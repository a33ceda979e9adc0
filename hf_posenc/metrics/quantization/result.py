"""Losses in low precision, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.tables import format_number, format_table


@dataclass(frozen=True)
class VariantRow:
    """One thing that is held in low precision.

    Args:
        variant: its name; `"float32"` for nothing.
        losses: mean loss in nats at each position of the text; `None` if there is none.
        reasons: why there is no loss, or `None`, one per position.
    """

    variant: str
    losses: tuple[float | None, ...]
    reasons: tuple[str | None, ...]


@dataclass(frozen=True)
class QuantizedLosses:
    """What low precision of positions costs one model.

    Args:
        model: name of the model's class.
        scheme: its scheme.
        causal: whether it predicts the next token.
        sequences: how many sequences were read.
        length: their length in tokens.
        positions: of the first token of every sequence.
        rows: `"float32"` first, then one per variant.
    """

    model: str
    scheme: str
    causal: bool
    sequences: int
    length: int
    positions: tuple[int, ...]
    rows: tuple[VariantRow, ...]

    def change(self, variant: str, position: int) -> float | None:
        """How much more the loss is than in float32 at the same position, in nats; `None` if there is none.

        Raises:
            KeyError: if the variant or the position was not measured.
        """
        found = {row.variant: row for row in self.rows}
        if variant not in found or position not in self.positions:
            raise KeyError(f"{variant!r} at {position} was not measured: {list(found)} at {list(self.positions)}.")
        index = self.positions.index(position)
        loss, reference = found[variant].losses[index], found["float32"].losses[index]
        return None if loss is None or reference is None else loss - reference

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field, and for each row its changes."""
        entry = asdict(self)
        for row, row_entry in zip(self.rows, entry["rows"], strict=True):
            row_entry["changes"] = [self.change(row.variant, position) for position in self.positions]
        return entry

    def table(self, *, markdown: bool = False) -> str:
        """The loss in float32, and below it how much more it is for each variant.

        Args:
            markdown: as a Markdown table.
        """
        reference = self.rows[0]
        cells = [[reference.variant, *("-" if loss is None else f"{loss:.4f}" for loss in reference.losses)]]
        for row in self.rows[1:]:
            changes = [self.change(row.variant, position) for position in self.positions]
            cells.append([row.variant, *("-" if change is None else _signed(change) for change in changes)])
        headers = ["held in", *(f"at {position}" for position in self.positions)]
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            for reason in dict.fromkeys(filter(None, row.reasons)):
                where = [
                    position for position, other in zip(self.positions, row.reasons, strict=True) if other == reason
                ]
                at = "" if len(where) == len(self.positions) else f" at {' and '.join(map(str, where))}"
                reasons.setdefault(reason, []).append(row.variant + at)
        paragraphs = [
            f"{self.model}, {self.scheme}: loss in nats with positions in float32, and its change",
            format_table(headers, cells, markdown=markdown),
            f"{self.sequences} sequences of {self.length} tokens, whose first stands at the position above the column.",
            *(f"{', '.join(where)}: {reason}" for reason, where in reasons.items()),
        ]
        return "\n\n".join(paragraphs)


def _signed(change: float) -> str:
    return ("+" if change > 0 else "") + format_number(change)
