"""Loss by length of one model on one text, under several schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.in_turn import UnderScheme, footnoted, measure_in_turn
from hf_posenc.metrics.language_modeling.by_length import TAIL, loss_by_length
from hf_posenc.metrics.language_modeling.pieces import Frame
from hf_posenc.metrics.language_modeling.result import LengthLosses, LengthRow, SlidingLoss, format_loss
from hf_posenc.metrics.language_modeling.text import (
    causal_targets,
    masked_targets,
    special_frame,
    stream_windows,
    token_stream,
)
from hf_posenc.metrics.language_modeling.token_losses import TOKENS_PER_BATCH, predicts_next_token
from hf_posenc.metrics.naming import first_row
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.tables import format_table


@dataclass(frozen=True)
class TextLosses:
    """Losses by length under several schemes.

    Args:
        model: name of the model's class.
        causal: whether it predicts the next token.
        windows: how many windows of text were read.
        tail_tokens: how many of the last tokens of each window the tail is.
        special_tokens: how many stand around every piece.
        rows: one per scheme; `value` is its `LengthLosses`.
    """

    model: str
    causal: bool
    windows: int
    tail_tokens: int
    special_tokens: int
    rows: tuple[UnderScheme[LengthLosses], ...]

    def row(self, scheme: str) -> UnderScheme[LengthLosses]:
        """The row of one scheme.

        Raises:
            KeyError: if it was not measured.
        """
        return first_row(self.rows, scheme, "result")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field, and for each row the dictionary of its `LengthLosses`."""
        entry = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "rows"}
        rows = [
            {
                "scheme": row.scheme,
                "label": row.label,
                "config": row.config,
                "notes": list(row.notes),
                "error": row.error,
                "losses": None if row.value is None else row.value.to_dict(),
            }
            for row in self.rows
        ]
        return {**entry, "rows": rows}

    def table(self, *, markdown: bool = False) -> str:
        """Mean loss, perplexity and loss of the tail, each a table of schemes by lengths; then the notes.

        Args:
            markdown: as Markdown tables.
        """
        first = next((row.value for row in self.rows if row.value is not None), None)
        columns = [] if first is None else [str(length) for length in first.lengths]
        if first is not None and first.sliding is not None:
            columns.append(f"sliding {first.sliding.window}/{first.sliding.stride}")
        labels, notes = [], []
        for label, new in footnoted(self.rows):
            labels.append(label)
            notes += new
        paragraphs = [f"{self.model}: {first.what()}"] if first is not None else [self.model]
        for title, quantity in (
            ("Mean loss", "loss"),
            ("Perplexity", "perplexity"),
            (f"Loss of the last {self.tail_tokens} tokens of each window", "tail_loss"),
        ):
            cells = [
                [label, *(_cells(row.value, quantity) if row.value else ["-"] * len(columns))]
                for label, row in zip(labels, self.rows, strict=True)
            ]
            if title == "Perplexity" and not self.causal:
                title = "Pseudo-perplexity (of masked tokens)"
            paragraphs += [f"{title}:", format_table(["scheme", *columns], cells, markdown=markdown)]
        notes += [f"{row.label}, {reason}" for row in self.rows if row.value for reason in _reasons(row.value)]
        return "\n\n".join([*paragraphs, *notes])


def text_losses(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    lengths: Sequence[int],
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    max_windows: int | None = 16,
    sliding_window: int | None = None,
    stride: int | None = None,
    tail: int | None = None,
    special_tokens: bool = True,
    mask_probability: float = 0.15,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    seed: int = 0,
) -> TextLosses:
    """Loss and perplexity of a model on held-out text, by length and by position, under one scheme or several.

    Every scheme and every length reads the same text; see `loss_by_length`. Masks of a masked model are drawn once.

    Args:
        model: a causal or masked language model, patched or not; left as it was found.
        tokenizer: its tokenizer.
        texts: held-out documents.
        lengths: in tokens; windows of text are as long as the longest.
        schemes: to patch into the stock model one after the other; `"native"` is the stock model, `None` the model as
            it is.
        max_windows: at most so many windows, evenly spread over the text; `None` reads all of it.
        sliding_window: length of the sliding window; `None` leaves it out.
        stride: of the sliding window; by default half of it.
        tail: how many of the last tokens of each window the tail is; by default 32, or half the shortest length.
        special_tokens: whether BOS, [CLS] and [SEP] stand around every piece, where the tokenizer uses them.
        mask_probability: for masked models.
        tokens_per_batch: tokens per forward call, which bounds memory.
        seed: of masks and of new scheme weights.

    Raises:
        MeasurementError: for text that is too short, or a masked model whose tokenizer has no mask token.
        UnsupportedError: for a model that is no language model.
    """
    lengths = sorted(set(lengths))
    if not lengths:
        raise MeasurementError("There is no length to evaluate at.")
    stream = token_stream(tokenizer, texts)
    if stream.shape[0] < 2:
        raise MeasurementError(f"The text has {stream.shape[0]} token(s): there is nothing to predict. Give more text.")
    causal = predicts_next_token(model, stream.unsqueeze(0))
    frame = special_frame(tokenizer, causal=causal) if special_tokens else Frame()
    if lengths[-1] <= frame.size:
        raise MeasurementError(f"A length of {lengths[-1]} holds nothing beside {frame.size} special tokens.")
    windows = stream_windows(stream, lengths[-1] - frame.size, max_windows=max_windows)
    if causal:
        input_ids, labels = causal_targets(windows)
    else:
        if tokenizer.mask_token_id is None:
            raise MeasurementError(
                f"{type(model).__name__} sees both sides of a token, so masked tokens are what it predicts, but the "
                f"tokenizer {type(tokenizer).__name__} has no mask token. Use the tokenizer of the model, or set its "
                f"mask_token."
            )
        input_ids, labels = masked_targets(windows, tokenizer.mask_token_id, probability=mask_probability, seed=seed)
    tail = min(TAIL, max(1, (lengths[0] - frame.size) // 2)) if tail is None else tail

    def measure(patched: Any) -> LengthLosses:
        return loss_by_length(
            patched,
            input_ids,
            labels,
            lengths,
            causal=causal,
            tail=tail,
            sliding_window=sliding_window,
            stride=stride,
            frame=frame,
            tokens_per_batch=tokens_per_batch,
        )

    rows = measure_in_turn(model, schemes, measure, seed=seed)
    return TextLosses(type(model).__name__, causal, windows.shape[0], tail, frame.size, tuple(rows))


def _entries(losses: LengthLosses) -> list[LengthRow | SlidingLoss]:
    return [*losses.rows, *([] if losses.sliding is None else [losses.sliding])]


def _cells(losses: LengthLosses, quantity: str) -> list[str]:
    return [format_loss(getattr(entry, quantity)) for entry in _entries(losses)]


def _reasons(losses: LengthLosses) -> list[str]:
    names = [f"length {row.length}" for row in losses.rows] + ["sliding window"]
    return [f"{name}: {entry.reason}" for name, entry in zip(names, _entries(losses), strict=False) if entry.reason]
