"""The loss of a model in which only positions, encodings or keys are in low precision.

The rounding is an ordinary position map around the scheme, so the patch puts it where it would put the scheme. It is
not registered, because it is only for measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.evaluation import digest, evaluation_result, measure_schemes
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.language_modeling.token_losses import (
    NOT_FINITE,
    TOKENS_PER_BATCH,
    check_batch,
    language_targets,
    mean_loss,
    text_windows,
    token_losses,
)
from hf_posenc.patching import native_scheme
from hf_posenc.patching.anatomy.anatomy import Anatomy, unwrapped
from hf_posenc.patching.place.encoding import (
    PositionEncoding,
    current_encoding,
    scheme_in_part,
    stacks_in_part,
)
from hf_posenc.report.records import Quantity, Record, Result
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.outer_parts import ChainedMap
from hf_posenc.schemes.parts import PositionMap, SchemeParts
from hf_posenc.schemes.position_maps.mapped import PositionMapConfig
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.validation import check_choice, check_integer

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {"int8": 8, "int4": 4}
FORMATS = (*FLOATS, *INTEGERS)


def rounded(
    values: Tensor, form: str, *, scale_over: tuple[int, ...] | None = None, counted: Tensor | None = None
) -> Tensor:
    """Rounds `values` to one of `FORMATS`.

    Integers are symmetric: the largest magnitude becomes the largest integer, 127 or 7. The dimensions `scale_over`
    share one integer scale (by default all), which covers the values that are `counted`; the others are clamped.
    """
    if form in FLOATS:
        largest = torch.finfo(FLOATS[form]).max
        # Values beyond the range of float16 are clamped: an infinite bias would be a mask.
        return values.clamp(-largest, largest).to(FLOATS[form]).to(values.dtype)
    steps = 2 ** (INTEGERS[form] - 1) - 1
    magnitudes = values.abs() if counted is None else values.abs().where(counted, 0.0)
    dims = tuple(range(values.dim())) if scale_over is None else scale_over
    scale = (magnitudes.amax(dim=dims, keepdim=True) / steps).clamp(min=torch.finfo(torch.float32).tiny)
    return ((values / scale).round().clamp(-steps, steps) * scale).to(values.dtype)


def rounded_ids(ids: Tensor, form: str) -> Tensor:
    """Rounds position ids as `position_ids.to(dtype)` does: bfloat16 has no 257, and float16 no 2049 and ends at 65504.

    Non-integer positions, which position maps may return, stay non-integer.
    """
    dtype = FLOATS[form]
    largest = torch.finfo(dtype).max
    return ids.to(dtype).double().clamp(max=largest).to(ids.dtype)


class RoundedPositions(PositionMap):
    """`p + offset`, rounded to a floating-point format (`None`: integers)."""

    def __init__(self, offset: int, form: str | None) -> None:
        super().__init__()
        self.offset = offset
        self.form = form

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)`; padding does not change."""
        ids = positions.ids + self.offset
        return (ids if self.form is None else rounded_ids(ids, self.form)).where(positions.ids >= 0, positions.ids)


class RoundedQueryKeyMap(ChainedMap):
    """Phases (cosines and sines) or the keys themselves in low precision; keys have one scale per token and head."""

    def __init__(self, mapped: ChainedMap, settings: QuantizedConfig) -> None:
        super().__init__({"inner": mapped.members()[0]}, mapped.position_map)
        self.settings = settings

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the phases of the inner map, rounded."""
        phases, form = super().phases(positions), self.settings.encodings
        return phases if form is None else tuple(rounded(phase, form) for phase in phases)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """Returns `(batch, key_value_heads, length, head_dim)`."""
        form = self.settings.keys
        if form is None:
            return super().map_key(key, phases)
        if self.settings.keys_before:
            return super().map_key(rounded(key, form, scale_over=(-1,)), phases)
        return rounded(super().map_key(key, phases), form, scale_over=(-1,))


@dataclass(frozen=True)
class QuantizedConfig(PositionMapConfig):
    """A scheme with one kind of its numbers in low precision.

    Args:
        inner: the scheme.
        offset: number that is added to every position first, so that short texts can be far into the context.
        ids: format of the position ids, "float16" or "bfloat16"; `None` for integers.
        encodings: format of the vectors, cosines and sines, biases and scales; `None` for float32.
        keys: format of the keys of a query-key map; `None` leaves them unchanged.
        keys_before: whether keys are rounded before they are mapped instead of after.
    """

    name: ClassVar[str] = "quantized"

    offset: int = 0
    ids: str | None = None
    encodings: str | None = None
    keys: str | None = None
    keys_before: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "offset", minimum=0)
        for field, choices in {"ids": tuple(FLOATS), "encodings": FORMATS, "keys": tuple(INTEGERS)}.items():
            if getattr(self, field) is not None:
                check_choice(self, field, choices)

    def position_map(self) -> RoundedPositions:
        """Returns a new map."""
        return RoundedPositions(self.offset, self.ids)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme, rounded.

        Raises:
            UnsupportedError: if the scheme has no parts, depends only on the order of tokens, or cannot be built here;
                and if keys are to be rounded, and the scheme does not map them.
        """
        try:
            parts = super().build(context)
        except UnsupportedError:
            raise
        except ValueError as error:
            raise UnsupportedError(str(error).replace(f"{type(self).__name__}.inner is", "The scheme is")) from error
        if self.keys is not None and parts.query_key_map is None:
            raise UnsupportedError(f"Scheme {self.inner.name!r} does not map keys, so it has no keys to round.")
        if isinstance(parts.query_key_map, ChainedMap):
            parts.query_key_map = RoundedQueryKeyMap(parts.query_key_map, self)
        if self.encodings is not None:
            for part in (parts.additive, parts.logit_scale):
                if part is not None:
                    part.register_forward_hook(lambda _, given, output: rounded(output, self.encodings))
            if parts.logit_bias is not None:
                parts.logit_bias.register_forward_hook(partial(self._round_bias, causal=context.causal))
        return parts

    def _round_bias(self, bias: nn.Module, given: tuple[AttentionPairs], output: Tensor, *, causal: bool) -> Tensor:
        """Rounds with one scale per head, for the keys that attention sees."""
        assert self.encodings is not None
        visible = given[0].slot_distance <= 0 if causal else None
        return rounded(output, self.encodings, scale_over=(0, 2, 3), counted=visible)


def quantized(config: SchemeConfig, settings: QuantizedConfig) -> SchemeConfig:
    """Puts `settings` around a scheme. If layers differ, it goes around the scheme of each layer that encodes anything.

    Raises:
        UnsupportedError: for a scheme that encodes nothing in any layer.
    """

    def wrapped(inner: SchemeConfig) -> SchemeConfig:
        if isinstance(inner, LayeredConfig):
            return inner.with_children({place: wrapped(child) for place, child in inner.children().items()})
        return inner if isinstance(inner, NoneConfig) else dataclasses.replace(settings, inner=inner)

    rounded_config = wrapped(config)
    if rounded_config == config:
        raise UnsupportedError(f"Scheme {config.name!r} encodes no positions, so there is nothing to round.")
    return rounded_config


#: Positions of the first token of the text in the context.
POSITIONS = (0, 1024, 4096)
#: What is in low precision, by its name in the table.
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
    """Runs `quantized_positions` on windows of a text, for each of several schemes.

    Args:
        model: a causal or masked language model, patched or not; it is left unchanged.
        tokenizer: its tokenizer.
        texts: documents to read; by default a short English text.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        length: tokens per window.
        max_windows: maximum number of windows, evenly spread over the text; `None` reads all of it.
        positions: positions of the first token of each window in the context.
        variants: names of what is rounded, from `VARIANTS`.
        tokens_per_batch: tokens per forward call.
        seed: seed of the masks and of new scheme weights.

    Returns:
        The records of `quantized_positions` for each scheme.

    Raises:
        MeasurementError: if the text is too short, or the tokenizer of a masked model has no mask token.
        UnsupportedError: if the model is not a language model.
    """
    windows = text_windows(tokenizer, texts, length, max_windows)
    causal = predicts_next_token(model, windows)
    batch = language_targets(model, tokenizer, windows, causal=causal, seed=seed)
    options: dict[str, Any] = {"positions": positions, "variants": variants, "tokens_per_batch": tokens_per_batch}

    def measure(patched: Any) -> list[Record]:
        return quantized_positions(patched, *batch, causal=causal, **options)

    sequences = windows.shape[0]
    return evaluation_result(
        "quantized",
        ": loss in nats with positional numbers held in low precision",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        (
            Quantity("loss", "at {position}", style="loss"),
            Quantity("change", "change at {position}", style="signed"),
        ),
        rows=("held in",),
        settings={"data": digest(*batch), "causal": causal, "sequences": sequences, "length": length, "seed": seed},
        remarks=(
            f"{sequences} sequences of {length} tokens. The heading of a column has the position of their first token. "
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
    """Measures how the loss changes if only positional numbers are in low precision.

    The scheme of the model is separated from everything else: weights and activations do not change, and one thing at a
    time is rounded. These are position ids, as `position_ids.to(dtype)` rounds them; encodings (vectors, cosines and
    sines, biases); or keys, before or after the map that makes them positional, with one integer scale per token and
    head (a quantised key cache has keys after the map; KVQuant, arXiv:2401.18079, section 3.2, quantises before it).
    The text is at several positions of the context: with a relative scheme, only the cost of rounding depends on them.

    The model is left unchanged, also after an error.

    Args:
        model: a causal or masked language model, patched or not; its scheme keeps its learned parameters.
        input_ids: `(sequences, length)` int64.
        labels: the same shape, not shifted; -100 at tokens that are not targets.
        positions: the position of the first token of every sequence.
        variants: names of what is rounded, from `VARIANTS`.
        causal: whether the model predicts the next token; `None` measures it.
        tokens_per_batch: tokens per forward call.

    Returns:
        For each variant (`at["held in"]`; `"float32"` for nothing) and each `position`, the mean `loss` in nats, and
        its `change` from the loss in float32. If there is no loss, the note has the reason.

    Raises:
        UnsupportedError: if the scheme encodes nothing, or depends only on the order of tokens.
        MeasurementError: for a batch that cannot be scored, an unknown variant, or a negative position.
    """
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown or not positions or min(positions) < 0:
        raise MeasurementError(
            f"positions must be 0 or more, got {list(positions)}; variants are {list(VARIANTS)}, got {list(variants)}."
        )
    check_batch(model, input_ids, labels, tokens_per_batch)
    causal = predicts_next_token(model, input_ids) if causal is None else causal
    target = unwrapped(model)
    encoding, part = current_encoding(target), Anatomy(target).part(None)
    in_force = scheme_in_part(encoding, part)
    config = native_scheme(target, part=part) if in_force is None else in_force
    learned = [] if encoding is None or in_force is None else _parameters_in(encoding, part)

    def measure(patched: Any) -> list[Record]:
        _take_over(patched, learned, part)
        try:
            losses = token_losses(patched, input_ids, labels, causal, tokens_per_batch=tokens_per_batch)
        except SequenceLengthError as error:
            return [Record("", "loss", note=str(error))]
        loss = mean_loss(losses)
        return [Record("", "loss", loss, note=NOT_FINITE if loss is None else "")]

    settings = {_EXACT: QuantizedConfig(), **{name: VARIANTS[name] for name in variants}}
    places = [(name, start) for name in settings for start in sorted(set(positions))]
    placed = [quantized(config, dataclasses.replace(settings[name], offset=start)) for name, start in places]
    subjects, measured = measure_schemes(model, placed, measure)
    losses = {record.subject: record for record in measured}
    records: list[Record] = []
    exact: dict[int, float | None] = {}
    for (name, start), subject in zip(places, subjects, strict=True):
        if subject.error and settings[name].keys is None:
            raise UnsupportedError(subject.error)
        # A scheme without keys to round has no loss in this variant, which is not an error.
        record = losses.get(subject.label, Record("", "loss", note=subject.error or ""))
        at, before = {"held in": name, "position": start}, exact.setdefault(start, record.value)
        records.append(dataclasses.replace(record, subject="", at=at))
        if name != _EXACT:
            change = None if record.value is None or before is None else record.value - before
            records.append(Record("", "change", change, at))
    return records


def _parameters_in(encoding: PositionEncoding, part: str) -> list[Tensor]:
    return [value for stack in stacks_in_part(encoding, part).values() for value in stack.state_dict().values()]


def _take_over(model: Any, learned: list[Tensor], part: str) -> None:
    """Copies the learned parameters of the scheme. The rounding has none, so they are in the same order."""
    encoding = current_encoding(unwrapped(model))
    assert encoding is not None
    fresh = _parameters_in(encoding, part)
    if learned and [tensor.shape for tensor in fresh] != [tensor.shape for tensor in learned]:
        raise UnsupportedError(
            f"The learned parameters of scheme {encoding.config.label!r} do not fit a new copy of it."
        )
    with torch.no_grad():
        for tensor, value in zip(fresh, learned, strict=False):
            tensor.copy_(value)
