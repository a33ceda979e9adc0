"""The loss of a long text under a window of the trained length that slides over it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.language_modeling.pieces import Frame
from hf_posenc.metrics.language_modeling.result import SlidingLoss
from hf_posenc.metrics.language_modeling.token_losses import (
    IGNORED,
    TOKENS_PER_BATCH,
    check_batch,
    predicts_next_token,
    token_losses,
)


def sliding_window_loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    window: int,
    stride: int | None = None,
    causal: bool | None = None,
    tail: int = 32,
    frame: Frame | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> SlidingLoss:
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
    if causal is None:
        causal = predicts_next_token(model, input_ids)
    losses = torch.full(input_ids.shape, float("nan"))
    plan = scored_spans(length, content, stride, causal)
    try:
        for start, first, last in plan:
            span = slice(start, start + content)
            targets = torch.full_like(labels[:, span], IGNORED)
            targets[:, first - start : last - start] = labels[:, first:last]
            if not bool((targets[:, causal and not frame.before :] != IGNORED).any()):
                continue
            framed = frame.around(input_ids[:, span], targets=False), frame.around(targets, targets=True)
            found = token_losses(model, *framed, causal, tokens_per_batch=tokens_per_batch)
            losses[:, first:last] = found[:, len(frame.before) :][:, first - start : last - start]
    except SequenceLengthError as error:
        return SlidingLoss(window, stride, None, None, 0, reason=str(error))
    loss, tail_loss = (float(part.double().nanmean()) for part in (losses, losses[:, -tail:]))
    finite = torch.tensor([loss, tail_loss]).isfinite().tolist()
    return SlidingLoss(
        window=window,
        stride=stride,
        loss=loss if finite[0] else None,
        tail_loss=tail_loss if finite[1] else None,
        targets=int((~losses.isnan()).sum()),
        reason=None if finite[0] else "The loss is not a finite number.",
    )


def scored_spans(length: int, window: int, stride: int, causal: bool) -> list[tuple[int, int, int]]:
    """Where each window starts, and from where to where it scores; the spans tile the text.

    Args:
        length: of the text, at least `window`.
        window: tokens per window.
        stride: between the starts of two windows.
        causal: whether a window scores what is new in it, or what stands around its middle.
    """
    starts = [*range(0, length - window, stride), length - window]
    if causal:
        ends = [start + window for start in starts]
    else:
        ends = [(start + window + following) // 2 for start, following in itertools.pairwise(starts)]
        ends.append(length)
    return list(zip(starts, [0, *ends[:-1]], ends, strict=True))
