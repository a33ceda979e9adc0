"""The loss of a model whose positions, encodings or keys alone are held in low precision."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.in_turn import measure_in_turn
from hf_posenc.metrics.language_modeling.token_losses import TOKENS_PER_BATCH, check_batch, token_losses
from hf_posenc.metrics.language_modeling.windows import language_targets, text_windows
from hf_posenc.metrics.quantization.scheme import QuantizedConfig, quantized
from hf_posenc.patching import native_scheme, patch_model, unpatch_model
from hf_posenc.patching.place.encoding import (
    PositionEncoding,
    current_encoding,
    named_part,
    scheme_in_part,
    stacks_in_part,
)
from hf_posenc.patching.place.model_checks import unwrapped
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.preserve import isolated_rng
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label

#: Where in the context the text stands.
POSITIONS = (0, 1024, 4096)
#: What is held in low precision, by the name it has in the table.
VARIANTS: dict[str, QuantizedConfig] = {
    "ids float16": QuantizedConfig(ids="float16"),
    "ids bfloat16": QuantizedConfig(ids="bfloat16"),
    "encodings float16": QuantizedConfig(encodings="float16"),
    "encodings bfloat16": QuantizedConfig(encodings="bfloat16"),
    "encodings int8": QuantizedConfig(encodings="int8"),
    "keys int8 before": QuantizedConfig(keys="int8", keys_before=True),
    "keys int8 after": QuantizedConfig(keys="int8"),
    "keys int4 before": QuantizedConfig(keys="int4", keys_before=True),
    "keys int4 after": QuantizedConfig(keys="int4"),
}
_EXACT = "float32"


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
        schemes: what is measured, one after the other; see `measure_in_turn`.
        length: tokens per window.
        max_windows: at most so many windows, evenly spread over the text; `None` reads all of it.
        positions: where in the context each window stands.
        variants: names out of `VARIANTS`.
        tokens_per_batch: tokens per forward call.
        seed: of masks and of new scheme weights.

    Returns:
        For each scheme the records of `quantized_positions`.

    Raises:
        MeasurementError: for text that is too short, or a masked model whose tokenizer has no mask token.
        UnsupportedError: for a model that is no language model.
    """
    windows = text_windows(tokenizer, texts, length, max_windows)
    causal = predicts_next_token(model, windows)
    batch = language_targets(model, tokenizer, windows, causal=causal, seed=seed)
    options: dict[str, Any] = {"positions": positions, "variants": variants, "tokens_per_batch": tokens_per_batch}

    def measure(patched: Any) -> list[Record]:
        return quantized_positions(patched, *batch, causal=causal, **options)

    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    name, sequences = type(model).__name__, windows.shape[0]
    return Result(
        task="quantized",
        title=f"{name}: loss in nats with positional numbers held in low precision",
        quantities=(
            Quantity("loss", "at {position}", style="loss"),
            Quantity("change", "change at {position}", style="signed"),
        ),
        subjects=subjects,
        records=records,
        views=(View(("loss", "change"), rows=("held in",)),),
        settings={"model": name, "causal": causal, "sequences": sequences, "length": length, "seed": seed},
        remarks=(
            f"{sequences} sequences of {length} tokens, whose first token stands at the position above the column. "
            "Changes are from the loss in float32 at the same position.",
        ),
    )


def quantized_positions(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    positions: Sequence[int] = POSITIONS,
    variants: Sequence[str] = tuple(VARIANTS),
    causal: bool | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[Record]:
    """What quality is lost when only positional numbers are held in low precision.

    The scheme the model has is taken apart from everything else: weights and activations stay as they are, and one
    thing at a time is rounded. Position ids, as `position_ids.to(dtype)` would; encodings (vectors, cosines and sines,
    biases); or keys, before or after the map that makes them positional, with one integer scale per token and head (a
    quantised key cache holds keys after it; KVQuant, arXiv:2401.18079, section 3.2, quantises before it). The text
    stands at several places of the context: a relative scheme does not care in float32, but what its rounding costs
    depends on it.

    The model is left as it was found, also after an error.

    Args:
        model: a causal or masked language model; patched or not, its scheme is measured with all it has learned.
        input_ids: `(sequences, length)` int64.
        labels: the same shape, not shifted; -100 at tokens that are no target.
        positions: the position of the first token of every sequence.
        variants: names out of `VARIANTS`.
        causal: whether the model predicts the next token; `None` finds out.
        tokens_per_batch: tokens per forward call.

    Returns:
        For each variant (`at["held in"]`; `"float32"` for nothing) and each `position` the mean `loss` in nats, and its
        `change` from that in float32. Where there is none, the note says why.

    Raises:
        UnsupportedError: for a scheme that encodes nothing, or that goes by the order of tokens alone.
        MeasurementError: for a batch that cannot be scored, an unknown variant, or a negative position.
    """
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown or not positions or min(positions) < 0:
        raise MeasurementError(
            f"Positions are 0 or more, got {list(positions)}; variants are of {list(VARIANTS)}, got {list(variants)}."
        )
    check_batch(model, input_ids, labels, tokens_per_batch)
    causal = predicts_next_token(model, input_ids) if causal is None else causal
    target = unwrapped(model)
    encoding, part = current_encoding(target), named_part(target, None)
    in_force = scheme_in_part(encoding, part)
    config = native_scheme(target, part=part) if in_force is None else in_force
    learned = [] if encoding is None or in_force is None else _parameters_in(encoding, part)

    def mean_loss(settings: QuantizedConfig) -> tuple[float | None, str]:
        """The loss under one scheme, or why there is none; without keys to round, that is the scheme's own affair."""
        placed = quantized(config, settings)
        with isolated_rng(0), warnings.catch_warnings():
            # What they say about generation and about invisible schemes holds for the scheme itself.
            warnings.simplefilter("ignore", UserWarning)
            try:
                patch_model(model, placed)
            except UnsupportedError as error:
                if settings.keys is None:
                    raise
                return None, str(error)
        try:
            _take_over(model, learned, part)
            losses = token_losses(model, input_ids, labels, causal, tokens_per_batch=tokens_per_batch)
        except SequenceLengthError as error:
            return None, str(error)
        finally:
            unpatch_model(model)
        loss = float(losses.double().nanmean())
        return (loss, "") if math.isfinite(loss) else (None, "The loss is not a finite number.")

    records: list[Record] = []
    exact: dict[int, float | None] = {}
    with Transaction(model).suspended():
        for name, settings in {_EXACT: QuantizedConfig(), **{name: VARIANTS[name] for name in variants}}.items():
            for start in sorted(set(positions)):
                loss, reason = mean_loss(dataclasses.replace(settings, offset=start))
                at, before = {"held in": name, "position": start}, exact.setdefault(start, loss)
                records.append(Record("", "loss", loss, at, note=reason))
                if name != _EXACT:
                    change = None if loss is None or before is None else loss - before
                    records.append(Record("", "change", change, at))
    return records


def _parameters_in(encoding: PositionEncoding, part: str) -> list[Tensor]:
    return [value for stack in stacks_in_part(encoding, part).values() for value in stack.state_dict().values()]


def _take_over(model: Any, learned: list[Tensor], part: str) -> None:
    """What the scheme has learned; around it nothing has parameters, so they come in the same order."""
    encoding = current_encoding(unwrapped(model))
    assert encoding is not None
    own = _parameters_in(encoding, part)
    if learned and [tensor.shape for tensor in own] != [tensor.shape for tensor in learned]:
        raise UnsupportedError(
            f"The parameters that scheme {scheme_label(encoding.config)!r} has learned do not fit a fresh copy of it."
        )
    with torch.no_grad():
        for tensor, value in zip(own, learned, strict=False):
            tensor.copy_(value)
