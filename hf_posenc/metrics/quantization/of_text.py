"""What low precision of positions costs a model on one text, under several schemes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.in_turn import UnderScheme, measure_in_turn
from hf_posenc.metrics.language_modeling.text import causal_targets, masked_targets, stream_windows, token_stream
from hf_posenc.metrics.language_modeling.token_losses import TOKENS_PER_BATCH, predicts_next_token
from hf_posenc.metrics.naming import first_row
from hf_posenc.metrics.quantization.measure import POSITIONS, VARIANTS, quantized_positions
from hf_posenc.metrics.quantization.result import QuantizedLosses
from hf_posenc.schemes.config import SchemeConfig


@dataclass(frozen=True)
class QuantizationResult:
    """What low precision costs under several schemes.

    Args:
        model: name of the model's class.
        rows: one per scheme; `value` is its `QuantizedLosses`.
    """

    model: str
    rows: tuple[UnderScheme[QuantizedLosses], ...]

    def row(self, scheme: str) -> UnderScheme[QuantizedLosses]:
        """The row of one scheme.

        Raises:
            KeyError: if it was not measured.
        """
        return first_row(self.rows, scheme, "result")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field, and for each scheme the dictionary of its `QuantizedLosses`."""
        rows = [asdict(row) | {"value": None if row.value is None else row.value.to_dict()} for row in self.rows]
        return {"model": self.model, "rows": rows}

    def table(self, *, markdown: bool = False) -> str:
        """One table per scheme.

        Args:
            markdown: as Markdown tables.
        """
        return "\n\n".join(
            f"{row.label} cannot be measured: {row.error}" if row.value is None else row.value.table(markdown=markdown)
            for row in self.rows
        )


def quantization_test(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    length: int = 128,
    max_windows: int | None = 4,
    positions: Sequence[int] = POSITIONS,
    variants: Sequence[str] = tuple(VARIANTS),
    tokens_per_batch: int = TOKENS_PER_BATCH,
    seed: int = 0,
) -> QuantizationResult:
    """`quantized_positions` on windows of a text, for each of several schemes.

    Args:
        model: a causal or masked language model, patched or not; left as it was found.
        tokenizer: its tokenizer.
        texts: documents to read.
        schemes: to patch into the stock model one after the other; `"native"` is the stock model, `None` the model as
            it is.
        length: tokens per window.
        max_windows: at most so many windows, evenly spread over the text; `None` reads all of it.
        positions: where in the context each window stands.
        variants: names out of `VARIANTS`.
        tokens_per_batch: tokens per forward call.
        seed: of masks and of new scheme weights.

    Raises:
        MeasurementError: for text that is too short, or a masked model whose tokenizer has no mask token.
        UnsupportedError: for a model that is no language model.
    """
    stream = token_stream(tokenizer, texts)
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

    def measure(patched: Any) -> QuantizedLosses:
        return quantized_positions(
            patched,
            input_ids,
            labels,
            positions=positions,
            variants=variants,
            causal=causal,
            tokens_per_batch=tokens_per_batch,
        )

    rows = measure_in_turn(model, schemes, measure, seed=seed)
    return QuantizationResult(type(model).__name__, tuple(rows))
