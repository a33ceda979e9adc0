"""Loss by length, by position and in a sliding window, on the same text for every length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError, SequenceLengthError
from hf_posenc.metrics.evaluation import digest, evaluation_result, measure_schemes
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.language_modeling.token_losses import (
    IGNORED,
    NOT_FINITE,
    TOKENS_PER_BATCH,
    Frame,
    check_batch,
    language_targets,
    mean_loss,
    special_frame,
    stream_windows,
    token_losses,
    token_stream,
)
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

#: Returns the losses of pieces for their tokens and labels.
_Read = Callable[[Tensor, Tensor], Tensor]
#: The number of last targets of a window, which have the longest context.
TAIL = 32


@dataclass(frozen=True)
class LengthRow:
    """The loss at one length, or in a sliding window.

    Args:
        length: tokens per piece, or of the sliding window.
        loss: mean over all targets, in nats; `None` if it is not finite, or the length cannot be represented.
        tail_loss: mean over the last targets of each window of text.
        targets: number of targets in the mean `loss`.
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
        """`exp(loss)`; infinite beyond the largest float."""
        if self.loss is None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class LengthLosses:
    """Loss of one model by length and by position.

    Args:
        rows: one per length, ascending.
        position_edges: edges of the position bins, from 0 to the longest length.
        position_loss: mean loss in each bin, in the pieces of the longest length that could be represented; `None` in
            bins beyond it and in bins without targets.
        sliding: the row of the sliding window, if there is one.
    """

    rows: tuple[LengthRow, ...]
    position_edges: tuple[int, ...]
    position_loss: tuple[float | None, ...]
    sliding: LengthRow | None = None

    def row(self, length: int) -> LengthRow:
        """Returns the row of one length; raises `KeyError` if it was not evaluated."""
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
    """Measures the loss of a model at several lengths, on the same held-out text.

    At every length, the same windows are cut into pieces of that length whose positions start at 0. If a length does
    not divide the window, the remainder at its start is read as a shorter piece. A causal model has no target at the
    start of a piece, so shorter pieces have slightly fewer targets (of a window of 1024 tokens: 1016 in pieces of 128,
    1023 in one piece). The tail, the last targets of each window, is the same at every length: only its context grows.

    The sliding window also reads the longest sequences, but never gives the model more than `sliding_window` tokens. A
    model that benefits from a longer context has a lower loss than this.

    Args:
        model: a causal or masked language model, patched or not; it is left unchanged.
        input_ids: `(windows, window_length)` int64; for masked models, with the mask token at the targets.
        labels: `(windows, window_length)`, not shifted; -100 at tokens that are not targets.
        lengths: the lengths to read, in tokens; at most the length of the windows plus the frame.
        causal: whether the model predicts the next token; `None` measures it.
        tail: number of last tokens of each window in the tail, less than the shortest length; by default 32, or half
            the text of the shortest length if that is less.
        position_bin: width of the position bins in tokens; by default half the shortest length.
        sliding_window: the length of the sliding window, usually the trained one; `None` omits it. A shorter text is
            one window.
        stride: stride of the sliding window in tokens, at most its length; by default half of it. With a stride of the
            whole window, a causal model cannot predict the first token of each window.
        frame: special tokens around each piece (BOS, [CLS] ... [SEP]), counted in its length.
        tokens_per_batch: tokens per forward call, which bounds memory.

    Returns:
        One row per length. If the model cannot represent a length, the row has the reason.

    Raises:
        MeasurementError: if the lengths do not fit the windows, the batch cannot be scored, or a sliding window or its
            stride leaves tokens out.
        UnsupportedError: for an encoder-decoder, or a model without one row of logits per token.
    """
    check_batch(model, input_ids, labels, tokens_per_batch)
    frame = frame or Frame()
    windows, window_length = input_ids.shape
    ascending = sorted(set(lengths))
    if not ascending or ascending[0] < frame.size + 2 or ascending[-1] > window_length + frame.size:
        raise MeasurementError(
            f"The lengths {ascending} do not fit windows of {window_length} tokens: at least one is needed, and each "
            f"is {frame.size + 2} to {window_length + frame.size} tokens. Use longer windows of text, or shorter "
            f"lengths."
        )
    tail = default_tail(ascending[0] - frame.size) if tail is None else tail
    if not 1 <= tail < ascending[0] - frame.size:
        raise MeasurementError(
            f"tail={tail} must be at least 1 and less than the shortest length ({ascending[0]}, {frame.size} of them "
            f"special tokens), so that every length reads the same tail in one piece."
        )
    position_bin = max(1, ascending[0] // 2) if position_bin is None else position_bin
    if position_bin < 1:
        raise MeasurementError(f"position_bin must be at least 1, got {position_bin}.")
    causal = predicts_next_token(model, input_ids) if causal is None else causal

    def read(ids: Tensor, targets: Tensor) -> Tensor:
        """Returns losses of pieces `(pieces, length)` with the frame around them; NaN where there is no target."""
        # A causal model cannot predict the first token of a piece, unless the frame has a token before it.
        if not bool((targets[:, causal and not frame.before :] != IGNORED).any()):
            return torch.full(ids.shape, math.nan)
        framed = frame.around(ids, targets=False), frame.around(targets, targets=True)
        losses = token_losses(model, *framed, causal, tokens_per_batch=tokens_per_batch)
        return losses[:, len(frame.before) : len(frame.before) + ids.shape[1]]

    rows: list[LengthRow] = []
    longest = torch.empty(windows, 0)
    for length in ascending:
        content = length - frame.size
        try:
            losses = _piecewise_losses(read, input_ids, labels, content)
        except SequenceLengthError as error:
            rows.append(LengthRow(length, None, None, 0, reason=str(error)))
            continue
        rows.append(_row(length, losses, tail))
        longest = losses[:, window_length % content :].reshape(-1, content)
    last = ascending[-1] - frame.size
    edges = [*range(0, last, position_bin), last]
    sliding = None
    if sliding_window is not None:
        sliding = _sliding_window(read, input_ids, labels, causal, frame, sliding_window, stride, tail)
    return LengthLosses(
        rows=tuple(rows),
        position_edges=tuple(edges),
        position_loss=tuple(mean_loss(longest[:, start:stop]) for start, stop in itertools.pairwise(edges)),
        sliding=sliding,
    )


def default_tail(shortest: int) -> int:
    """Returns 32 tokens, or half the text of the shortest length if that is less."""
    return min(TAIL, max(1, shortest // 2))


def _sliding_window(
    read: _Read,
    input_ids: Tensor,
    labels: Tensor,
    causal: bool,
    frame: Frame,
    window: int,
    stride: int | None,
    tail: int,
) -> LengthRow:
    """Measures the mean loss when every target is predicted from at most `window` tokens, including the frame.

    This is the perplexity of the transformers guide ("Perplexity of fixed-length models") and of YaRN
    (arXiv:2309.00071, section 4.1): windows start `stride` tokens apart, and each scores only the targets that no
    earlier window has seen. After the first window, every target therefore has at least `window - stride` tokens of
    context. The last window is moved back to end with the text; in the guide it is shorter. For a model that sees both
    sides, each target is scored by the window in which it is closest to the middle.
    """
    length = input_ids.shape[1]
    content = min(window - frame.size, length)
    stride = max(1, content // 2) if stride is None else stride
    if content < 2 or not 1 <= stride <= content:
        raise MeasurementError(
            f"A sliding window of {window} tokens, {frame.size} of them special, with stride {stride} leaves tokens "
            f"out: the stride must be at least 1, and at most the {max(content, 0)} tokens of text in a window."
        )
    losses = torch.full(input_ids.shape, math.nan)
    try:
        for start, first, last in scored_spans(length, content, stride, causal):
            span, scored = slice(start, start + content), slice(first - start, last - start)
            targets = torch.full_like(labels[:, span], IGNORED)
            targets[:, scored] = labels[:, first:last]
            losses[:, first:last] = read(input_ids[:, span], targets)[:, scored]
    except SequenceLengthError as error:
        return LengthRow(window, None, None, 0, str(error), stride)
    return _row(window, losses, tail, stride)


def scored_spans(length: int, window: int, stride: int, causal: bool) -> list[tuple[int, int, int]]:
    """Returns where each window starts, and where its scores start and end; the spans tile the text.

    A causal window scores the tokens that are new in it, a bidirectional one the tokens around its middle.
    """
    starts = [*range(0, length - window, stride), length - window]
    if causal:
        ends = [start + window for start in starts]
    else:
        ends = [(start + window + following) // 2 for start, following in itertools.pairwise(starts)]
        ends.append(length)
    return list(zip(starts, [0, *ends[:-1]], ends, strict=True))


def _piecewise_losses(read: _Read, input_ids: Tensor, labels: Tensor, content: int) -> Tensor:
    """`(windows, window_length)`: losses in pieces counted from the end; the rest at the start is a shorter piece."""
    rest = input_ids.shape[1] % content
    columns = []
    for piece, size in ((slice(0, rest), rest), (slice(rest, None), content)):
        if size:
            ids, targets = (tokens[:, piece].reshape(-1, size) for tokens in (input_ids, labels))
            columns.append(read(ids, targets).reshape(input_ids.shape[0], -1))
    return torch.cat(columns, dim=1)


def _row(length: int, losses: Tensor, tail: int, stride: int | None = None) -> LengthRow:
    loss = mean_loss(losses)
    reason = None if loss is not None else NOT_FINITE
    tails = losses[:, -tail:]
    of_windows = tuple(mean_loss(window) for window in tails)
    return LengthRow(length, loss, mean_loss(tails), int((~losses.isnan()).sum()), reason, stride, of_windows)


#: The share of tokens that BERT was trained to predict (arXiv:1810.04805, section 3.1).
_MASKED = 0.15


def text_losses(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    lengths: Sequence[int] = (128, 512, 1024),
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    max_windows: int | None = 16,
    sliding_window: int | None = None,
    stride: int | None = None,
    tail: int | None = None,
    special_tokens: bool = True,
    mask_probability: float | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    seed: int = 0,
) -> Result:
    """Measures loss and perplexity on held-out text, by length and by position, under one scheme or several.

    Every scheme and every length reads the same text; see `loss_by_length`. Masks of a masked model are drawn once.

    Args:
        model: a causal or masked language model, patched or not; it is left unchanged.
        tokenizer: its tokenizer.
        texts: held-out documents.
        lengths: the lengths to read, in tokens; windows of text are as long as the longest.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        max_windows: maximum number of windows, evenly spread over the text; `None` reads all of it.
        sliding_window: length of the sliding window; `None` omits it.
        stride: stride of the sliding window; by default half its length.
        tail: number of last tokens of each window that form the tail; by default 32, or half the shortest length.
        special_tokens: whether to put BOS, [CLS] and [SEP] around every piece, if the tokenizer uses them.
        mask_probability: share of the tokens that are predicted, for masked models only; by default 0.15.
        tokens_per_batch: tokens per forward call, which bounds memory.
        seed: seed of the masks and of new scheme weights.

    Returns:
        Records of these quantities, in nats except for the perplexities:

        - `loss`, `perplexity` and `tail_loss`, by `length`. The count is the number of targets.
        - `sliding_loss`, `sliding_perplexity` and `sliding_tail_loss`, by `window` and `stride`.
        - `position_loss` for the positions from `start` to before `stop`, in pieces of the longest length.

    Raises:
        MeasurementError: if the text is too short, a masked model's tokenizer has no mask token, or a causal model gets
            a `mask_probability`.
        UnsupportedError: if the model is not a language model.
    """
    lengths = sorted(set(lengths))
    if not lengths:
        raise MeasurementError("No lengths are given; at least one is needed.")
    if stride is not None and sliding_window is None:
        raise MeasurementError("stride is for the sliding window: pass sliding_window too.")
    stream = token_stream(tokenizer, texts)
    if stream.shape[0] < 2:
        raise MeasurementError(f"The text has {stream.shape[0]} token(s): there is nothing to predict. Use more text.")
    causal = predicts_next_token(model, stream.unsqueeze(0))
    if causal and mask_probability is not None:
        raise MeasurementError(f"mask_probability is for masked models, but {type(model).__name__} masks no tokens.")
    frame = special_frame(tokenizer, causal=causal) if special_tokens else Frame()
    if lengths[-1] <= frame.size:
        raise MeasurementError(f"A length of {lengths[-1]} has no room for text with {frame.size} special tokens.")
    windows = stream_windows(stream, lengths[-1] - frame.size, max_windows=max_windows)
    probability = _MASKED if mask_probability is None else mask_probability
    batch = language_targets(model, tokenizer, windows, causal=causal, probability=probability, seed=seed)
    tail = default_tail(lengths[0] - frame.size) if tail is None else tail

    def measure(patched: Any) -> list[Record]:
        measured = loss_by_length(
            patched, *batch, lengths, causal=causal, tail=tail, sliding_window=sliding_window, stride=stride,
            frame=frame, tokens_per_batch=tokens_per_batch,
        )  # fmt: skip
        records = [record for row in measured.rows for record in _records(row, "", {"length": row.length})]
        if measured.sliding is not None:
            at = {"window": measured.sliding.length, "stride": measured.sliding.stride}
            records += _records(measured.sliding, "sliding_", at)
        bins = itertools.pairwise(measured.position_edges)
        places = ({"start": start, "stop": stop} for start, stop in bins)
        by_place = zip(places, measured.position_loss, strict=True)
        return records + [Record("", "position_loss", loss, place) for place, loss in by_place]

    count, kind = windows.shape[0], "the next token" if causal else "masked tokens"
    titles = {
        "loss": "Mean loss",
        "perplexity": "Perplexity" if causal else "Pseudo-perplexity (of masked tokens)",
        "tail_loss": f"Loss of the last {tail} tokens of each window",
    }
    return evaluation_result(
        "loss",
        f": loss of {kind} in nats, over the same {count} x {windows.shape[1]} tokens at every length.",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        (
            *(Quantity(quantity, "{length}", style="loss") for quantity in titles),
            *(Quantity(f"sliding_{quantity}", "sliding {window}/{stride}", style="loss") for quantity in titles),
            Quantity("position_loss", "{start} to {stop}", style="loss"),
        ),
        views=[View((quantity, f"sliding_{quantity}"), title) for quantity, title in titles.items()],
        settings={
            "data": digest(*batch),
            "causal": causal,
            "lengths": list(lengths),
            "windows": count,
            "tail_tokens": tail,
            "special_tokens": frame.size,
            "seed": seed,
        },
    )


def _records(row: LengthRow, prefix: str, at: dict[str, Any]) -> list[Record]:
    # JSON has no infinity.
    perplexity = row.perplexity if row.perplexity is not None and math.isfinite(row.perplexity) else None
    note = f"{'sliding window' if prefix else 'length'} {row.length}: {row.reason}" if row.reason else ""
    return [
        Record("", f"{prefix}loss", row.loss, at, count=row.targets, note=note),
        Record("", f"{prefix}perplexity", perplexity, at),
        Record("", f"{prefix}tail_loss", row.tail_loss, at),
    ]
