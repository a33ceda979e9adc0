"""Losses by length."""

from __future__ import annotations

import math
from dataclasses import dataclass


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


def perplexity(loss: float | None) -> float | None:
    """`exp(loss)`; infinite past the largest float."""
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 else math.inf
