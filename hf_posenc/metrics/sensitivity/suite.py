"""All that a change of order or of place does to a model, under several schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_posenc.metrics.in_turn import measure_in_turn
from hf_posenc.metrics.representations import is_causal, rounding
from hf_posenc.metrics.sensitivity.material import ENGLISH, Material, tokenize_material
from hf_posenc.metrics.sensitivity.permuted_context import permuted_context
from hf_posenc.metrics.sensitivity.repeated_words import GAPS, repeated_sentences, repeated_words
from hf_posenc.metrics.sensitivity.result import PositionSensitivity, SensitivityResult
from hf_posenc.metrics.sensitivity.role_swaps import role_swaps
from hf_posenc.metrics.sensitivity.shifted_positions import SHIFTS, shifted_positions
from hf_posenc.metrics.words import TokenizedPair
from hf_posenc.schemes.config import SchemeConfig


def sensitivity_test(
    model: Any,
    tokenizer: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    gaps: Sequence[int] = GAPS,
    context: int = 48,
    offsets: Sequence[int] = SHIFTS,
    material: Material = ENGLISH,
    text: str | None = None,
    seed: int = 0,
) -> SensitivityResult:
    """Measures what repeated words, exchanged roles, a shuffled context and shifted positions do to a model.

    In an encoder all of it is 0 without position information, up to rounding: it sees a set of tokens. In a causal
    model the mask itself tells positions apart from the second layer on (a token's state depends on what stood before
    it), so its numbers are to be read beside those of the scheme `"none"`.

    The model is left as it was found, also after an error.

    Args:
        model: any transformers model, patched or not. Of an encoder-decoder the encoder is measured.
        tokenizer: its tokenizer.
        schemes: names or configs to patch into the stock model one after the other, newly initialised unless a scheme
            takes over native weights; `"native"` is the stock model itself. `None` measures the model as it is.
        gaps: tokens from a word to its repetition; see `repeated_words`.
        context: tokens that are shuffled; see `permuted_context`.
        offsets: what is added to positions; see `shifted_positions`.
        material: the words of the sentences; English by default.
        text: a text to shuffle and to shift, in place of that of the material.
        seed: of the shuffles and of newly created scheme weights.

    Returns:
        One row per scheme. A scheme that the model cannot take has the reason in `error`.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is touched.
        MeasurementError: if the tokenizer lacks the words, or the text is too short.
        UnsupportedError: if the model returns no hidden states.
    """
    if text is not None:
        material = dataclasses.replace(material, passage=text)
    tokens = tokenize_material(tokenizer, material)
    sentences, first = repeated_sentences(tokens, min(gaps, default=2))
    words = tuple(tokenizer.convert_ids_to_tokens(sentences[0].tolist()))
    causal = is_causal(model, TokenizedPair(sentences[:1], (first,), (first + min(gaps, default=2),), words))

    def measure(patched: Any) -> PositionSensitivity:
        return PositionSensitivity(
            repeated=repeated_words(patched, tokens, gaps),
            roles=role_swaps(patched, tokens, causal=causal),
            permuted=permuted_context(patched, tokens, causal=causal, context=context, seed=seed),
            shifted=shifted_positions(patched, tokens, offsets=offsets),
        )

    rows = measure_in_turn(model, schemes, measure, seed=seed)
    tolerance = rounding(model.get_input_embeddings().weight.dtype)
    return SensitivityResult(type(model).__name__, causal, tolerance, tuple(rows))
