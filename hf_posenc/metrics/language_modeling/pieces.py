"""The same tokens, cut into pieces of one length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.language_modeling.token_losses import IGNORED, token_losses


@dataclass(frozen=True)
class Frame:
    """Special tokens around every piece, as the model saw them in training.

    Args:
        before: ids such as BOS or [CLS]; no targets.
        after: ids such as [SEP]; no targets.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many tokens of a sequence they take."""
        return len(self.before) + len(self.after)

    def around(self, tokens: Tensor, *, targets: bool) -> Tensor:
        """`(sequences, n)` -> `(sequences, n + size)`; labels get no targets here."""
        ends = [
            torch.full((tokens.shape[0], len(ids)), IGNORED, dtype=tokens.dtype)
            if targets
            else torch.tensor(ids, dtype=tokens.dtype).expand(tokens.shape[0], len(ids))
            for ids in (self.before, self.after)
        ]
        return torch.cat([ends[0], tokens.cpu(), ends[1]], dim=1)


def cut(tokens: Tensor, length: int) -> list[Tensor]:
    """Pieces of `length` tokens, counted from the end of each window, and the remainder at its start as a piece.

    Args:
        tokens: `(windows, window_length)`.
        length: tokens per piece.

    Returns:
        The remainders `(windows, rest)` if there are any, then `(windows * pieces, length)`: all pieces of the first
        window, then those of the second.
    """
    rest = tokens.shape[1] % length
    whole = tokens[:, rest:].reshape(-1, length)
    return [tokens[:, :rest], whole] if rest else [whole]


def piecewise_losses(
    model: Any, input_ids: Tensor, labels: Tensor, length: int, causal: bool, frame: Frame, tokens_per_batch: int
) -> Tensor:
    """Losses of whole windows read in pieces of one length, `(windows, window_length)`; see `token_losses`.

    Args:
        model: a language model.
        input_ids: `(windows, window_length)`.
        labels: the same shape.
        length: tokens per piece, those of the frame included.
        causal: whether it predicts the next token.
        frame: special tokens around each piece.
        tokens_per_batch: tokens per forward call.
    """
    content = length - frame.size
    if content < 1:
        raise MeasurementError(f"A length of {length} leaves no room for text beside {frame.size} special tokens.")
    columns = []
    for ids, targets in zip(cut(input_ids, content), cut(labels, content), strict=True):
        if not bool((targets[:, causal and not frame.before :] != IGNORED).any()):
            columns.append(torch.full(ids.shape, math.nan).reshape(input_ids.shape[0], -1))
            continue
        framed = frame.around(ids, targets=False), frame.around(targets, targets=True)
        losses = token_losses(model, *framed, causal, tokens_per_batch=tokens_per_batch)
        start = len(frame.before)
        columns.append(losses[:, start : start + ids.shape[1]].reshape(input_ids.shape[0], -1))
    return torch.cat(columns, dim=1)


def check_lengths(lengths: Sequence[int], window_length: int, frame: Frame) -> tuple[int, ...]:
    """Ascending lengths without repetition.

    Raises:
        MeasurementError: if there are none, or one is longer than the windows of text.
    """
    ascending = tuple(sorted(set(lengths)))
    if not ascending:
        raise MeasurementError("There is no length to evaluate at.")
    if ascending[0] < frame.size + 2 or ascending[-1] > window_length + frame.size:
        raise MeasurementError(
            f"The lengths {list(ascending)} do not fit windows of {window_length} tokens: a length is at least "
            f"{frame.size + 2} and at most {window_length + frame.size} here. Give longer windows of text, or shorter "
            f"lengths."
        )
    return ascending
