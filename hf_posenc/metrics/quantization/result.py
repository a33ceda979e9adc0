"""Losses in low precision."""

from __future__ import annotations

from dataclasses import dataclass


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
