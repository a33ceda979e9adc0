"""The loss of a model whose positions, encodings or keys alone are held in low precision."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.language_modeling.token_losses import (
    TOKENS_PER_BATCH,
    check_batch,
    predicts_next_token,
    token_losses,
)
from hf_posenc.metrics.preserve import isolated_rng
from hf_posenc.metrics.quantization.result import QuantizedLosses, VariantRow
from hf_posenc.metrics.quantization.scheme import QuantizedConfig, quantized
from hf_posenc.patching import native_scheme, patch_model, unpatch_model
from hf_posenc.patching.apply import current_encoding, unwrapped
from hf_posenc.patching.suspend import suspended
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


def quantized_positions(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    positions: Sequence[int] = POSITIONS,
    variants: Sequence[str] = tuple(VARIANTS),
    causal: bool | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> QuantizedLosses:
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
    if causal is None:
        causal = predicts_next_token(model, input_ids)
    encoding = current_encoding(unwrapped(model))
    config = native_scheme(model) if encoding is None else encoding.config
    learned = [] if encoding is None else list(encoding.stacks.state_dict().values())
    starts = tuple(sorted(set(positions)))
    wanted = {"float32": QuantizedConfig(), **{name: VARIANTS[name] for name in variants}}
    rows = []
    with suspended(model):
        for name, settings in wanted.items():
            losses: list[float | None] = []
            reasons: list[str | None] = []
            for start in starts:
                placed = quantized(config, _at(settings, start))
                loss, reason = _loss(
                    model, placed, learned, input_ids, labels, causal, tokens_per_batch, settings.keys is not None
                )
                losses.append(loss)
                reasons.append(reason)
            rows.append(VariantRow(name, tuple(losses), tuple(reasons)))
    return QuantizedLosses(
        model=type(model).__name__,
        scheme=scheme_label(config),
        causal=causal,
        sequences=input_ids.shape[0],
        length=input_ids.shape[1],
        positions=starts,
        rows=tuple(rows),
    )


def _at(settings: QuantizedConfig, start: int) -> QuantizedConfig:
    return dataclasses.replace(settings, offset=start)


def _loss(
    model: Any,
    config: SchemeConfig,
    learned: list[Tensor],
    input_ids: Tensor,
    labels: Tensor,
    causal: bool,
    tokens_per_batch: int,
    rounds_keys: bool,
) -> tuple[float | None, str | None]:
    """The loss under one scheme, or why there is none; without keys to round, that is the scheme's own affair."""
    with isolated_rng(0), warnings.catch_warnings():
        # What they say about generation and about invisible schemes holds for the scheme itself.
        warnings.simplefilter("ignore", UserWarning)
        try:
            patch_model(model, config)
        except UnsupportedError as error:
            if not rounds_keys:
                raise
            return None, str(error)
    try:
        _take_over(model, learned)
        losses = token_losses(model, input_ids, labels, causal, tokens_per_batch=tokens_per_batch)
    except SequenceLengthError as error:
        return None, str(error)
    finally:
        unpatch_model(model)
    loss = float(losses.double().nanmean())
    return (loss, None) if math.isfinite(loss) else (None, "The loss is not a finite number.")


def _take_over(model: Any, learned: list[Tensor]) -> None:
    """What the scheme has learned; around it nothing has parameters, so they come in the same order."""
    encoding = current_encoding(unwrapped(model))
    assert encoding is not None
    own = list(encoding.stacks.state_dict().values())
    if not learned:
        return
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in learned]:
        raise UnsupportedError(
            f"The parameters that scheme {encoding.config.name!r} has learned do not fit a fresh copy of it."
        )
    with torch.no_grad():
        for tensor, value in zip(own, learned, strict=True):
            tensor.copy_(value)
