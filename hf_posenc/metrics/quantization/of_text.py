"""What low precision of positions costs a model on one text, under several schemes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.in_turn import Measured, measure_in_turn
from hf_posenc.metrics.language_modeling.text import causal_targets, masked_targets, stream_windows, token_stream
from hf_posenc.metrics.language_modeling.token_losses import TOKENS_PER_BATCH, predicts_next_token
from hf_posenc.metrics.quantization.measure import POSITIONS, VARIANTS, quantized_positions
from hf_posenc.metrics.quantization.result import QuantizedLosses
from hf_posenc.metrics.sensitivity.material import ENGLISH
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

_QUANTITIES = (
    Quantity("loss", "at {position}", style="loss"),
    Quantity("change", "change at {position}", style="signed"),
)


def quantization_test(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str] | None = None,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    length: int = 128,
    max_windows: int | None = 4,
    positions: Sequence[int] = POSITIONS,
    variants: Sequence[str] = tuple(VARIANTS),
    tokens_per_batch: int = TOKENS_PER_BATCH,
    seed: int = 0,
) -> Result:
    """`quantized_positions` on windows of a text, for each of several schemes.

    Args:
        model: a causal or masked language model, patched or not; left as it was found.
        tokenizer: its tokenizer.
        texts: documents to read; by default a short English text.
        schemes: to patch into the stock model one after the other; `"native"` is the stock model, `None` the model as
            it is.
        length: tokens per window.
        max_windows: at most so many windows, evenly spread over the text; `None` reads all of it.
        positions: where in the context each window stands.
        variants: names out of `VARIANTS`.
        tokens_per_batch: tokens per forward call.
        seed: of masks and of new scheme weights.

    Returns:
        For each scheme, each `variant` (what is held in low precision; `"float32"` for nothing) and each `position` of
        the first token the mean `loss` in nats, and its `change` from that in float32.

    Raises:
        MeasurementError: for text that is too short, or a masked model whose tokenizer has no mask token.
        UnsupportedError: for a model that is no language model.
    """
    stream = token_stream(tokenizer, [ENGLISH.passage] if texts is None else texts)
    windows = stream_windows(stream, length, max_windows=max_windows)
    causal = predicts_next_token(model, windows)
    if causal:
        input_ids, labels = causal_targets(windows)
    elif tokenizer.mask_token_id is None:
        raise MeasurementError(
            f"{type(model).__name__} predicts masked tokens, but {type(tokenizer).__name__} has no mask token."
        )
    else:
        input_ids, labels = masked_targets(windows, tokenizer.mask_token_id, seed=seed)

    def measure(patched: Any) -> Measured:
        found = quantized_positions(
            patched,
            input_ids,
            labels,
            positions=positions,
            variants=variants,
            causal=causal,
            tokens_per_batch=tokens_per_batch,
        )
        return Measured(list(_records(found)))

    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    name, sequences = type(model).__name__, windows.shape[0]
    return Result(
        task="quantized",
        title=f"{name}: loss in nats with positional numbers held in low precision",
        quantities=_QUANTITIES,
        subjects=subjects,
        records=records,
        views=(View(("loss", "change"), rows=("held in",)),),
        settings={"model": name, "causal": causal, "sequences": sequences, "length": length, "seed": seed},
        remarks=(
            f"{sequences} sequences of {length} tokens, whose first token stands at the position above the column. "
            "Changes are from the loss in float32 at the same position.",
        ),
    )


def _records(found: QuantizedLosses) -> Iterator[Record]:
    for row in found.rows:
        for position, loss, reason in zip(found.positions, row.losses, row.reasons, strict=True):
            at = {"held in": row.variant, "position": position}
            yield Record("", "loss", loss, at, note=reason or "")
            if row.variant != "float32":
                yield Record("", "change", found.change(row.variant, position), at)
