"""Loss by length and by position, on the same text for every length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.language_modeling.pieces import Frame, check_lengths, piecewise_losses
from hf_posenc.metrics.language_modeling.result import LengthLosses, LengthRow
from hf_posenc.metrics.language_modeling.sliding import sliding_window_loss
from hf_posenc.metrics.language_modeling.token_losses import TOKENS_PER_BATCH, check_batch, predicts_next_token

#: The last targets of a window, the ones with the longest context.
TAIL = 32


def loss_by_length(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool | None = None,
    tail: int = TAIL,
    position_bin: int | None = None,
    sliding_window: int | None = None,
    stride: int | None = None,
    frame: Frame | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> LengthLosses:
    """What a model does at several lengths, on the same held-out text at each.

    Every length reads the same windows, cut into pieces of that length whose positions start at 0. Where a length does
    not divide the window, the remainder at its start is read as a shorter piece. A causal model has no target at the
    start of a piece, so that shorter pieces have a few targets less (of a window of 1024 tokens: 1016 in pieces of 128,
    1023 in one piece). The tail, the last targets of each window, is the same set of targets at every length: only the
    context before it grows.

    Beside it the sliding window reads the longest sequences without ever giving the model more than `sliding_window`
    tokens: a model that gains from its longer context is below it.

    Args:
        model: a causal or masked language model, patched or not; left as it was found.
        input_ids: `(windows, window_length)` int64; masked models: with the mask token at the targets.
        labels: `(windows, window_length)`, not shifted; -100 at tokens that are no target.
        lengths: in tokens, at most that of the windows (plus the frame).
        causal: whether the model predicts the next token; `None` finds out.
        tail: how many of the last tokens of each window the tail is, less than the shortest length.
        position_bin: width in tokens of the bins of the loss by position; by default half the shortest length.
        sliding_window: the length of the sliding window, usually the trained one; `None` leaves it out.
        stride: of the sliding window; by default half of it.
        frame: special tokens around each piece (BOS, [CLS] ... [SEP]), counted in its length.
        tokens_per_batch: tokens per forward call, which bounds memory.

    Returns:
        One row per length. A length that the model cannot represent has the reason in its row.

    Raises:
        MeasurementError: for lengths that do not fit the windows, or a batch that cannot be scored.
        UnsupportedError: for an encoder-decoder, or a model without one row of logits per token.
    """
    check_batch(model, input_ids, labels, tokens_per_batch)
    frame = frame or Frame()
    windows, window_length = input_ids.shape
    ascending = check_lengths(lengths, window_length, frame)
    if not 1 <= tail < ascending[0] - frame.size:
        raise MeasurementError(
            f"tail={tail} must be at least 1 and less than the shortest length ({ascending[0]}, {frame.size} of them "
            f"special tokens), so that every length reads the same tail in one piece."
        )
    position_bin = max(1, ascending[0] // 2) if position_bin is None else position_bin
    if position_bin < 1:
        raise MeasurementError(f"position_bin must be at least 1, got {position_bin}.")
    if causal is None:
        causal = predicts_next_token(model, input_ids)
    rows: list[LengthRow] = []
    longest = torch.empty(windows, 0)
    for length in ascending:
        try:
            losses = piecewise_losses(model, input_ids, labels, length, causal, frame, tokens_per_batch)
        except SequenceLengthError as error:
            rows.append(LengthRow(length, None, None, 0, reason=str(error)))
            continue
        content = length - frame.size
        rows.append(_row(length, losses, tail))
        longest = losses[:, window_length % content :].reshape(-1, content)
    last = ascending[-1] - frame.size
    edges = [*range(0, last, position_bin), last]
    sliding = None
    if sliding_window is not None:
        sliding = sliding_window_loss(
            model,
            input_ids,
            labels,
            window=sliding_window,
            stride=stride,
            causal=causal,
            tail=tail,
            frame=frame,
            tokens_per_batch=tokens_per_batch,
        )
    return LengthLosses(
        causal=causal,
        windows=windows,
        window_length=window_length,
        tail_tokens=tail,
        rows=tuple(rows),
        position_edges=tuple(edges),
        position_loss=tuple(mean_loss(longest[:, start:stop]) for start, stop in itertools.pairwise(edges)),
        sliding=sliding,
    )


def mean_loss(losses: Tensor) -> float | None:
    """The mean of those that are targets; `None` if there are none, or it is no finite number."""
    mean = float(losses.double().nanmean()) if losses.numel() else math.nan
    return mean if math.isfinite(mean) else None


def _row(length: int, losses: Tensor, tail: int) -> LengthRow:
    loss, tail_loss = mean_loss(losses), mean_loss(losses[:, -tail:])
    targets = int((~losses.isnan()).sum())
    reason = None if loss is not None else "The loss is not a finite number."
    return LengthRow(length, loss, tail_loss, targets, reason=reason)
