"""The dog test: do the two dogs of "The dog chased another dog" differ for the model?"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.metrics.distance import cosine_distance, relative_l2
from hf_posenc.metrics.dog_result import DogResult, DogRow, LayerDistance
from hf_posenc.metrics.naming import resolve_scheme
from hf_posenc.metrics.preserve import evaluation_mode, isolated_rng
from hf_posenc.metrics.probe import AttentionProbe, build_for_probe, probe_distance, probe_heads
from hf_posenc.metrics.representations import hidden_states, is_causal, rounding, sentence_embeddings
from hf_posenc.metrics.words import TokenizedPair, tokenize_pair
from hf_posenc.patching import native_scheme, patch_model, unpatch_model
from hf_posenc.patching.apply import current_encoding, unwrapped
from hf_posenc.patching.suspend import suspended
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.positions import Positions, integer_range

SENTENCE = "The dog chased another dog"
WORD = "dog"
NATIVE = "native"

CAUSAL_NOTE = (
    "The model is causal: the two occurrences see different prefixes, so from layer 1 on the mask alone tells them "
    "apart, with or without positions. Read the probe, which has no mask, for what the scheme adds."
)
ENCODER_NOTE = "Measured on the encoder of an encoder-decoder model."


def dog_test(
    model: Any,
    tokenizer: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    sentence: str = SENTENCE,
    word: str = WORD,
    *,
    seed: int = 0,
) -> DogResult:
    """Measures how far apart a model holds two occurrences of the same word.

    An encoder without positions cannot tell the two apart: equal tokens attend to the same set of tokens, and
    stay equal at every layer. What sets them apart is the position encoding, and nothing else. A causal model is
    different, because its mask shows each a different prefix; beside the model, the scheme is therefore placed in
    a random attention without mask, over the same embeddings (`AttentionProbe`).

    The model is left as it was found, also after an error: scheme and weights, mode of every module, dtype,
    random state. The scheme of a patched model is taken out with all it has learned, and put back.

    Args:
        model: any transformers model, patched or not. Of an encoder-decoder the encoder is measured.
        tokenizer: its tokenizer.
        schemes: names or configs to patch in, one after the other, on top of the stock model; newly initialised,
            unless a scheme takes over native weights. `"native"` is the stock model itself. `None` measures the
            model as it is.
        sentence: a sentence that holds `word` twice.
        word: one token or several; see `tokenize_pair`.
        seed: of the probe and of newly created scheme weights.

    Returns:
        One row per scheme. A scheme that the architecture cannot take has its reason in `error`.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is touched.
        MeasurementError: if the sentence does not hold the word twice as the same tokens, the tokenizer does not
            belong to the model, or a scheme given by name needs options.
        UnsupportedError: if the model returns no hidden states.
    """
    wanted = None if schemes is None else [None if scheme == NATIVE else resolve_scheme(scheme) for scheme in schemes]
    pair = tokenize_pair(tokenizer, sentence, word)
    embeddings = sentence_embeddings(model, pair.input_ids)
    probe = AttentionProbe(embeddings.shape[-1], probe_heads(embeddings.shape[-1]), seed=seed)
    with isolated_rng(seed), evaluation_mode(model):
        causal = is_causal(model, pair)
        test = _DogTest(pair, embeddings, probe, causal, seed)
        if wanted is None:
            rows = [test.as_found(model)]
        else:
            with suspended(model):
                rows = [test.native(model) if config is None else test.patched(model, config) for config in wanted]
    notes = [CAUSAL_NOTE] if causal else []
    notes += [ENCODER_NOTE] if getattr(model.config, "is_encoder_decoder", False) else []
    return DogResult(
        model=type(model).__name__,
        sentence=sentence,
        word=word,
        tokens=pair.tokens,
        first=pair.first,
        second=pair.second,
        causal=causal,
        probe_without_positions=probe_distance(probe, embeddings, pair.first, pair.second),
        rows=tuple(rows),
        notes=tuple(notes),
    )


class _DogTest:
    """The measurements of one call, which share a sentence and a probe."""

    def __init__(self, pair: TokenizedPair, embeddings: Tensor, probe: AttentionProbe, causal: bool, seed: int) -> None:
        self.pair = pair
        self.embeddings = embeddings
        self.probe = probe
        self.causal = causal
        self.seed = seed

    def as_found(self, model: Any) -> DogRow:
        encoding = current_encoding(unwrapped(model))
        if encoding is None:
            return self.native(model)
        return self.measure(model, encoding.config.name, encoding.config, [])

    def native(self, model: Any) -> DogRow:
        try:
            config, notes = native_scheme(model), []
        except UnsupportedError as error:
            config, notes = None, [f"The native scheme has no name here: {error}"]
        return self.measure(model, NATIVE, config, notes)

    def patched(self, model: Any, config: SchemeConfig) -> DogRow:
        """Patches, measures and restores a stock model."""
        try:
            with isolated_rng(self.seed), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                patch_model(model, config)
            try:
                model.eval()
                notes = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
                return self.measure(model, config.name, config, notes + _adopted_notes(model))
            finally:
                unpatch_model(model)
        except UnsupportedError as error:
            tolerance = rounding(self.embeddings.dtype)
            label = scheme_label(config)
            return DogRow(config.name, config.to_dict(), (), None, tolerance, self.causal, label, error=str(error))

    def measure(self, model: Any, name: str, config: SchemeConfig | None, notes: list[str]) -> DogRow:
        states = hidden_states(model, self.pair.input_ids)
        first, second = list(self.pair.first), list(self.pair.second)
        layers = tuple(
            LayerDistance(layer, relative_l2(state[first], state[second]), cosine_distance(state[first], state[second]))
            for layer, state in enumerate(states)
        )
        distance = None
        if config is not None:
            try:
                distance = probe_distance(
                    self.probe, self.embeddings, self.pair.first, self.pair.second, config, seed=self.seed
                )
            except ValueError as error:
                notes = [*notes, f"The probe has no number: {error}"]
        label = name if config is None else scheme_label(config)
        row = DogRow(
            scheme=name,
            config=None if config is None else config.to_dict(),
            layers=layers,
            probe=distance,
            tolerance=rounding(states[0].dtype),
            causal=self.causal,
            label=f"{NATIVE} ({config.name})" if name == NATIVE and config is not None else label,
            notes=tuple(notes),
        )
        if config is None or not row.identical or notes or not distance:
            return row
        return dataclasses.replace(row, notes=(self._why_invisible(model, config),))

    def _why_invisible(self, model: nn.Module, config: SchemeConfig) -> str:
        """Why a scheme that acts in the probe has no effect in the model."""
        parts = build_for_probe(self.probe, config, seed=self.seed)
        ids = integer_range(0, self.embeddings.shape[0])
        uniform = False
        if parts.additive is not None:
            vectors = parts.additive(Positions(ids, torch.tensor([[ids.shape[1]]])))
            uniform = bool((vectors == vectors[..., :1]).all())
        if uniform and any(isinstance(module, nn.LayerNorm) for module in model.modules()):
            return (
                f"Invisible: {config.name} adds the same number to every component of a token, and LayerNorm "
                f"subtracts the mean over the components. The distance is 0 up to rounding, as without positions."
            )
        return (
            f"Invisible: {config.name} tells the two apart in the probe, but not in this model; the distance is 0 "
            f"up to rounding."
        )


def _adopted_notes(model: Any) -> list[str]:
    encoding = current_encoding(unwrapped(model))
    report = None if encoding is None else encoding.report
    adopted = [] if report is None else [entry for stack in report.stacks for entry in stack.adopted]
    if not adopted:
        return []
    shown = ", ".join(adopted[:2]) + (f" and {len(adopted) - 2} more" if len(adopted) > 2 else "")
    return [f"Takes over weights of the stock model ({shown}); the others are newly initialised."]
