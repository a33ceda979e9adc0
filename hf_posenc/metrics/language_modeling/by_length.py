"""Loss by length, by position and under a sliding window, on the same text for every length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError, SequenceLengthError
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.language_modeling.token_losses import IGNORED, TOKENS_PER_BATCH, check_batch, token_losses
from hf_posenc.metrics.language_modeling.windows import Frame

#: The last targets of a window, the ones with the longest context.
TAIL = 32


@dataclass(frozen=True)
class LengthRow:
    """The loss at one length, or under a sliding window.

    Args:
        length: tokens per piece, or of the sliding window.
        loss: mean over all targets, in nats; `None` if it is not a finite number, or the length cannot be represented.
        tail_loss: mean over the last targets of each window of text.
        targets: how many targets `loss` is the mean of.
        reason: why there is no loss, or `None`.
        stride: tokens between the starts of two sliding windows.
        window_tail_losses: `tail_loss` of each window of text, whose differences show how much it depends on the text;
            `None` in windows without targets there.
    """

    length: int
    loss: float | None
    tail_loss: float | None
    targets: int
    reason: str | None = None
    stride: int | None = None
    window_tail_losses: tuple[float | None, ...] = ()

    @property
    def perplexity(self) -> float | None:
        """`exp(loss)`; infinite past the largest float."""
        if self.loss is None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class LengthLosses:
    """Loss by length and by position of one model.

    Args:
        rows: one per length, ascending.
        position_edges: edges of the bins of position, from 0 to the longest length.
        position_loss: mean loss in each bin, in the pieces of the longest length that could be represented; `None` in
            bins past it and in bins without targets.
        sliding: the sliding window beside it, if it was asked for.
    """

    rows: tuple[LengthRow, ...]
    position_edges: tuple[int, ...]
    position_loss: tuple[float | None, ...]
    sliding: LengthRow | None = None

    def row(self, length: int) -> LengthRow:
        """The row of one length; a `KeyError` if it was not evaluated."""
        return {row.length: row for row in self.rows}[length]


def loss_by_length(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool | None = None,
    tail: int | None = None,
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
        tail: how many of the last tokens of each window the tail is, less than the shortest length; by default 32, or
            half the shortest length if that has no more than 32 tokens of text.
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
    ascending = sorted(set(lengths))
    if not ascending or ascending[0] < frame.size + 2 or ascending[-1] > window_length + frame.size:
        raise MeasurementError(
            f"The lengths {ascending} do not fit windows of {window_length} tokens: there is at least one, of at least "
            f"{frame.size + 2} and at most {window_length + frame.size} tokens. Give longer windows of text, or "
            f"shorter lengths."
        )
    if tail is None:
        tail = TAIL if ascending[0] - frame.size > TAIL else default_tail(ascending[0], frame)
    if not 1 <= tail < ascending[0] - frame.size:
        raise MeasurementError(
            f"tail={tail} must be at least 1 and less than the shortest length ({ascending[0]}, {frame.size} of them "
            f"special tokens), so that every length reads the same tail in one piece."
        )
    position_bin = max(1, ascending[0] // 2) if position_bin is None else position_bin
    if position_bin < 1:
        raise MeasurementError(f"position_bin must be at least 1, got {position_bin}.")
    causal = predicts_next_token(model, input_ids) if causal is None else causal
    rows: list[LengthRow] = []
    longest = torch.empty(windows, 0)
    for length in ascending:
        content = length - frame.size
        try:
            losses = _piecewise_losses(model, input_ids, labels, content, causal, frame, tokens_per_batch)
        except SequenceLengthError as error:
            rows.append(LengthRow(length, None, None, 0, reason=str(error)))
            continue
        rows.append(_row(length, losses, tail))
        longest = losses[:, window_length % content :].reshape(-1, content)
    last = ascending[-1] - frame.size
    edges = [*range(0, last, position_bin), last]
    sliding = None
    if sliding_window is not None:
        common: dict[str, Any] = {"causal": causal, "tail": tail, "frame": frame, "tokens_per_batch": tokens_per_batch}
        sliding = sliding_window_loss(model, input_ids, labels, window=sliding_window, stride=stride, **common)
    return LengthLosses(
        rows=tuple(rows),
        position_edges=tuple(edges),
        position_loss=tuple(_mean(longest[:, start:stop]) for start, stop in itertools.pairwise(edges)),
        sliding=sliding,
    )


def default_tail(shortest: int, frame: Frame) -> int:
    """32 tokens, or half the text of the shortest length if that is less."""
    return min(TAIL, max(1, (shortest - frame.size) // 2))


def sliding_window_loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    window: int,
    stride: int | None = None,
    causal: bool | None = None,
    tail: int = TAIL,
    frame: Frame | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> LengthRow:
    """Mean loss when every target is predicted from at most `window` tokens.

    The perplexity of the transformers guide ("Perplexity of fixed-length models") and of YaRN (arXiv:2309.00071,
    section 4.1): windows start `stride` tokens apart, and each scores only the targets that no window before it has
    seen, so that behind the first window every target has at least `window - stride` tokens of context. The last window
    is moved back to end with the text, where the guide's is shorter. For a model that sees both sides, each target is
    scored by the window in whose middle it stands most nearly.

    Args:
        model: a causal or masked language model; left as it was found.
        input_ids: `(windows, window_length)` int64: each row is one long text.
        labels: `(windows, window_length)`, not shifted; -100 at tokens that are no target.
        window: tokens per forward, those of the frame included; usually the trained length. Texts that are shorter
            are read in one piece.
        stride: in tokens, at most `window`; by default half of it. With a stride of the whole window a causal model
            has no prediction of the first token of each.
        causal: whether the model predicts the next token; `None` finds out.
        tail: how many of the last tokens of each text the tail is.
        frame: special tokens around each window, counted in its length.
        tokens_per_batch: tokens per forward call.

    Raises:
        MeasurementError: for a window or stride that leaves tokens out.
    """
    check_batch(model, input_ids, labels, tokens_per_batch)
    frame = frame or Frame()
    length = input_ids.shape[1]
    content = min(window - frame.size, length)
    stride = max(1, content // 2) if stride is None else stride
    if content < 2 or not 1 <= stride <= content:
        raise MeasurementError(
            f"A sliding window of {window} tokens, {frame.size} of them special, with stride {stride} leaves tokens "
            f"out: the stride is at least 1 and at most the {max(content, 0)} tokens of text in a window."
        )
    causal = predicts_next_token(model, input_ids) if causal is None else causal
    losses = torch.full(input_ids.shape, math.nan)
    try:
        for start, first, last in scored_spans(length, content, stride, causal):
            span, scored = slice(start, start + content), slice(first - start, last - start)
            targets = torch.full_like(labels[:, span], IGNORED)
            targets[:, scored] = labels[:, first:last]
            found = _framed_losses(model, input_ids[:, span], targets, causal, frame, tokens_per_batch)
            losses[:, first:last] = found[:, scored]
    except SequenceLengthError as error:
        return LengthRow(window, None, None, 0, str(error), stride)
    return _row(window, losses, tail, stride)


def scored_spans(length: int, window: int, stride: int, causal: bool) -> list[tuple[int, int, int]]:
    """Where each window starts, and from where to where it scores; the spans tile the text.

    A causal window scores what is new in it, a bidirectional one what stands around its middle.
    """
    starts = [*range(0, length - window, stride), length - window]
    if causal:
        ends = [start + window for start in starts]
    else:
        ends = [(start + window + following) // 2 for start, following in itertools.pairwise(starts)]
        ends.append(length)
    return list(zip(starts, [0, *ends[:-1]], ends, strict=True))


def _framed_losses(
    model: Any, ids: Tensor, targets: Tensor, causal: bool, frame: Frame, tokens_per_batch: int
) -> Tensor:
    """Losses of pieces `(pieces, length)` with special tokens around them; NaN where there is no target."""
    # A causal model has nothing to predict the first token of a piece from, unless the frame begins it.
    if not bool((targets[:, causal and not frame.before :] != IGNORED).any()):
        return torch.full(ids.shape, math.nan)
    framed = frame.around(ids, targets=False), frame.around(targets, targets=True)
    losses = token_losses(model, *framed, causal, tokens_per_batch=tokens_per_batch)
    return losses[:, len(frame.before) : len(frame.before) + ids.shape[1]]


def _piecewise_losses(
    model: Any, input_ids: Tensor, labels: Tensor, content: int, causal: bool, frame: Frame, tokens_per_batch: int
) -> Tensor:
    """`(windows, window_length)`: losses in pieces counted from the end; what is left at the start is a shorter one."""
    rest = input_ids.shape[1] % content
    columns = []
    for piece, size in ((slice(0, rest), rest), (slice(rest, None), content)):
        if size:
            ids, targets = (tokens[:, piece].reshape(-1, size) for tokens in (input_ids, labels))
            losses = _framed_losses(model, ids, targets, causal, frame, tokens_per_batch)
            columns.append(losses.reshape(input_ids.shape[0], -1))
    return torch.cat(columns, dim=1)


def _mean(losses: Tensor) -> float | None:
    """The mean of those that are targets; `None` if there are none, or it is no finite number."""
    mean = float(losses.double().nanmean()) if losses.numel() else math.nan
    return mean if math.isfinite(mean) else None


def _row(length: int, losses: Tensor, tail: int, stride: int | None = None) -> LengthRow:
    loss = _mean(losses)
    reason = None if loss is not None else "The loss is not a finite number."
    tails = losses[:, -tail:]
    of_windows = tuple(_mean(window) for window in tails)
    return LengthRow(length, loss, _mean(tails), int((~losses.isnan()).sum()), reason, stride, of_windows)
