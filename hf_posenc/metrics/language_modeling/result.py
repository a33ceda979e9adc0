"""Losses by length, as data and as a table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.tables import format_table


@dataclass(frozen=True)
class LengthRow:
    """One length.

    Args:
        length: tokens per piece.
        loss: mean over all targets, in nats; `None` if it is not a finite number, or the length cannot be represented.
        tail_loss: mean over the last targets of each window.
        targets: how many targets `loss` is the mean of.
        reason: why there is no loss, or `None`.
    """

    length: int
    loss: float | None
    tail_loss: float | None
    targets: int
    reason: str | None = None

    @property
    def perplexity(self) -> float | None:
        """`exp(loss)`."""
        return perplexity(self.loss)


@dataclass(frozen=True)
class SlidingLoss:
    """The loss under a sliding window.

    Args:
        window: the most tokens that a prediction is made from.
        stride: tokens between the starts of two windows.
        loss: mean over all targets, in nats; `None` if there is none.
        tail_loss: mean over the last targets of each text.
        targets: how many targets `loss` is the mean of.
        reason: why there is no loss, or `None`.
    """

    window: int
    stride: int
    loss: float | None
    tail_loss: float | None
    targets: int
    reason: str | None = None

    @property
    def perplexity(self) -> float | None:
        """`exp(loss)`."""
        return perplexity(self.loss)


@dataclass(frozen=True)
class LengthLosses:
    """Loss by length and by position of one model.

    Args:
        causal: whether it predicts the next token; a masked model predicts masked ones.
        windows: how many windows of text were read.
        window_length: their length in tokens.
        tail_tokens: how many of the last tokens of each window the tail is.
        rows: one per length, ascending.
        position_edges: edges of the bins of position, from 0 to the longest length.
        position_loss: mean loss in each bin, in the pieces of the longest length that could be represented; `None` in
            bins past it and in bins without targets.
        sliding: the sliding window beside it, if it was asked for.
    """

    causal: bool
    windows: int
    window_length: int
    tail_tokens: int
    rows: tuple[LengthRow, ...]
    position_edges: tuple[int, ...]
    position_loss: tuple[float | None, ...]
    sliding: SlidingLoss | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, ascending."""
        return tuple(row.length for row in self.rows)

    def row(self, length: int) -> LengthRow:
        """The row of one length.

        Raises:
            KeyError: if it was not evaluated.
        """
        for row in self.rows:
            if row.length == length:
                return row
        raise KeyError(f"No row for length {length}; the lengths are {list(self.lengths)}.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, one list per quantity, in the order of `lengths`."""
        return {
            "causal": self.causal,
            "windows": self.windows,
            "window_length": self.window_length,
            "lengths": list(self.lengths),
            "loss": [row.loss for row in self.rows],
            "tail_loss": [row.tail_loss for row in self.rows],
            "targets": [row.targets for row in self.rows],
            "reasons": [row.reason for row in self.rows],
            "tail_tokens": self.tail_tokens,
            "position_edges": list(self.position_edges),
            "position_loss": list(self.position_loss),
            "sliding": None if self.sliding is None else asdict(self.sliding),
        }

    def table(self, *, markdown: bool = False) -> str:
        """Loss, perplexity and tail loss by length, then what the numbers are means of.

        Args:
            markdown: as a Markdown table.
        """
        cells, reasons = [], []
        entries: list[LengthRow | SlidingLoss] = [*self.rows, *([] if self.sliding is None else [self.sliding])]
        for row in entries:
            name = str(row.length) if isinstance(row, LengthRow) else f"sliding {row.window}/{row.stride}"
            if row.reason is not None:
                reasons.append(f"{name}: {row.reason}")
            cells.append([name, *map(format_loss, (row.loss, row.perplexity, row.tail_loss)), str(row.targets)])
        headers = ["length", "loss", "perplexity", f"last {self.tail_tokens}", "targets"]
        paragraphs = [format_table(headers, cells, markdown=markdown), *reasons, self.what()]
        return "\n\n".join(paragraphs)

    def what(self) -> str:
        """One sentence on what was read."""
        kind = "the next token" if self.causal else "masked tokens"
        return (
            f"Loss of {kind} in nats, over the same {self.windows} x {self.window_length} tokens of text at every "
            f"length."
        )


def perplexity(loss: float | None) -> float | None:
    """`exp(loss)`; infinite past the largest float."""
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 else math.inf


def format_loss(value: float | None) -> str:
    """Four significant digits, a missing value as `-`."""
    return "-" if value is None else f"{value:.4g}"
