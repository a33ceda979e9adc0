"""Loss by length of one model on one text, under several schemes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.in_turn import measure_in_turn
from hf_posenc.metrics.language_modeling.by_length import LengthRow, default_tail, loss_by_length
from hf_posenc.metrics.language_modeling.token_losses import TOKENS_PER_BATCH
from hf_posenc.metrics.language_modeling.windows import (
    Frame,
    language_targets,
    special_frame,
    stream_windows,
    token_stream,
)
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

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
    """Loss and perplexity of a model on held-out text, by length and by position, under one scheme or several.

    Every scheme and every length reads the same text; see `loss_by_length`. Masks of a masked model are drawn once.

    Args:
        model: a causal or masked language model, patched or not; left as it was found.
        tokenizer: its tokenizer.
        texts: held-out documents.
        lengths: in tokens; windows of text are as long as the longest.
        schemes: what is measured, one after the other; see `measure_in_turn`.
        max_windows: at most so many windows, evenly spread over the text; `None` reads all of it.
        sliding_window: length of the sliding window; `None` leaves it out.
        stride: of the sliding window; by default half of it.
        tail: how many of the last tokens of each window the tail is; by default 32, or half the shortest length.
        special_tokens: whether BOS, [CLS] and [SEP] stand around every piece, where the tokenizer uses them.
        mask_probability: share of the tokens that are predicted, for masked models only; by default 0.15.
        tokens_per_batch: tokens per forward call, which bounds memory.
        seed: of masks and of new scheme weights.

    Returns:
        Records of these quantities, in nats but for the perplexities:

        - `loss`, `perplexity` and `tail_loss`, by `length`. The count is that of the targets.
        - `sliding_loss`, `sliding_perplexity` and `sliding_tail_loss`, by `window` and `stride`.
        - `position_loss` of the positions from `start` to before `stop`, in pieces of the longest length.

    Raises:
        MeasurementError: for text that is too short, a masked model whose tokenizer has no mask token, or a causal one
            with a `mask_probability`.
        UnsupportedError: for a model that is no language model.
    """
    lengths = sorted(set(lengths))
    if not lengths:
        raise MeasurementError("There is no length to evaluate at.")
    if stride is not None and sliding_window is None:
        raise MeasurementError("stride is that of the sliding window; give sliding_window too.")
    stream = token_stream(tokenizer, texts)
    if stream.shape[0] < 2:
        raise MeasurementError(f"The text has {stream.shape[0]} token(s): there is nothing to predict. Give more text.")
    causal = predicts_next_token(model, stream.unsqueeze(0))
    if causal and mask_probability is not None:
        raise MeasurementError(f"mask_probability is for masked models, and {type(model).__name__} masks no tokens.")
    frame = special_frame(tokenizer, causal=causal) if special_tokens else Frame()
    if lengths[-1] <= frame.size:
        raise MeasurementError(f"A length of {lengths[-1]} holds nothing beside {frame.size} special tokens.")
    windows = stream_windows(stream, lengths[-1] - frame.size, max_windows=max_windows)
    probability = _MASKED if mask_probability is None else mask_probability
    batch = language_targets(model, tokenizer, windows, causal=causal, probability=probability, seed=seed)
    options: dict[str, Any] = {
        "causal": causal,
        "tail": default_tail(lengths[0], frame) if tail is None else tail,
        "sliding_window": sliding_window,
        "stride": stride,
        "frame": frame,
        "tokens_per_batch": tokens_per_batch,
    }

    def measure(patched: Any) -> list[Record]:
        found = loss_by_length(patched, *batch, lengths, **options)
        records = [one for row in found.rows for one in _records(row, "", {"length": row.length})]
        if found.sliding is not None:
            at = {"window": found.sliding.length, "stride": found.sliding.stride}
            records += _records(found.sliding, "sliding_", at)
        bins = itertools.pairwise(found.position_edges)
        return records + [
            Record("", "position_loss", loss, {"start": start, "stop": stop})
            for (start, stop), loss in zip(bins, found.position_loss, strict=True)
        ]

    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    name, count, kind = type(model).__name__, windows.shape[0], "the next token" if causal else "masked tokens"
    titles = {
        "loss": "Mean loss",
        "perplexity": "Perplexity" if causal else "Pseudo-perplexity (of masked tokens)",
        "tail_loss": f"Loss of the last {options['tail']} tokens of each window",
    }
    return Result(
        task="loss",
        title=f"{name}: loss of {kind} in nats, over the same {count} x {windows.shape[1]} tokens at every length.",
        quantities=(
            *(Quantity(quantity, "{length}", style="loss") for quantity in titles),
            *(Quantity(f"sliding_{quantity}", "sliding {window}/{stride}", style="loss") for quantity in titles),
            Quantity("position_loss", "{start} to {stop}", style="loss"),
        ),
        subjects=subjects,
        records=records,
        views=tuple(View((quantity, f"sliding_{quantity}"), title) for quantity, title in titles.items()),
        settings={
            "model": name,
            "causal": causal,
            "lengths": list(lengths),
            "windows": count,
            "tail_tokens": options["tail"],
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
