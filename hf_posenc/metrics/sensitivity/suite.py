"""All that a change of order or of place does to a model, under several schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_posenc.metrics.in_turn import Measured, measure_in_turn
from hf_posenc.metrics.representations import is_causal, rounding
from hf_posenc.metrics.sensitivity.material import ENGLISH, Material, tokenize_material
from hf_posenc.metrics.sensitivity.permuted_context import PermutedContext, permuted_context
from hf_posenc.metrics.sensitivity.repeated_words import GAPS, RepeatedWords, repeated_sentences, repeated_words
from hf_posenc.metrics.sensitivity.role_swaps import RoleSwaps, role_swaps
from hf_posenc.metrics.sensitivity.shifted_positions import SHIFTS, ShiftedPositions, shifted_positions
from hf_posenc.metrics.words import TokenizedPair
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.tables import format_number

_CAUSAL_NOTE = (
    "The model is causal: its mask shows every token another prefix, so it sees order without positions too. Read each "
    "number beside that of 'none'."
)
_ENCODER_NOTE = (
    "The model sees both sides: without position information all but the shifts is 0 up to {tolerance} (rounding)."
)
_SHOWN_GAPS = 4
_QUANTITIES = (
    Quantity("repeated", "gap {gap}"),
    Quantity("word_role", "word's role"),
    Quantity("roles", "roles"),
    Quantity("loss", "loss", style="loss"),
    Quantity("shuffled", "shuffled"),
    Quantity("shuffled_loss", "shuffled: loss"),
    Quantity("shuffled_block", "in {block}s"),
    Quantity("shuffled_block_loss", "in {block}s: loss"),
    Quantity("shift", "+{offset}"),
    Quantity("left_padding", "left pad"),
    Quantity("sees_order", "sees order", style="verdict"),
)


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
) -> Result:
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
        Records of these quantities, each a relative L2 change:

        - `repeated`, by `gap` and `layer` (0: the embeddings): distance of the two states of a repeated word.
        - `word_role` and `roles`, by `layer`: subject and object exchanged.
        - `shuffled`, and `shuffled_block` by `block`: a shuffled context. `shuffled_loss` and `shuffled_block_loss` are
          the rise of the `loss` in nats.
        - `shift`, by `offset`: positions that start elsewhere; `left_padding`, by `tokens`.
        - `sees_order`: passed if the model is an encoder and any of these, shifts aside, is larger than rounding.

        A scheme that the model cannot take has the reason in the `error` of its subject.

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

    tolerance = rounding(model.get_input_embeddings().weight.dtype)
    remarks: dict[str, None] = {}

    def measure(patched: Any) -> Measured:
        repeated = repeated_words(patched, tokens, gaps)
        roles = role_swaps(patched, tokens, causal=causal)
        permuted = permuted_context(patched, tokens, causal=causal, context=context, seed=seed)
        shifted = shifted_positions(patched, tokens, offsets=offsets)
        remarks[_explanation(repeated, roles, permuted, causal=causal)] = None
        order = [*_repeated(repeated), *_roles(roles), *_shuffled(permuted)]
        largest = max(one.value or 0.0 for one in order if not one.quantity.endswith("loss"))
        sees_order = Record("", "sees_order", passed=None if causal else largest > tolerance)
        return Measured([*order, *_shifted(shifted), sees_order])

    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    known_gaps = [record.at["gap"] for record in records if record.quantity == "repeated"]
    layers = [record.at["layer"] for record in records if "layer" in record.at]
    shown = {"gap": _spread(sorted(set(known_gaps))), "layer": [max(layers, default=0)]}
    note = _CAUSAL_NOTE if causal else _ENCODER_NOTE.format(tolerance=format_number(tolerance))
    return Result(
        task="sensitivity",
        title=f"{type(model).__name__}: relative changes of states and outputs",
        quantities=_QUANTITIES,
        subjects=subjects,
        records=records,
        views=(View(tuple(one.name for one in _QUANTITIES if one.name != "sees_order"), shown=shown),),
        settings={
            "model": type(model).__name__,
            "causal": causal,
            "tolerance": tolerance,
            "context": context,
            "seed": seed,
        },
        remarks=(*remarks, note),
    )


def _repeated(found: RepeatedWords) -> list[Record]:
    records = []
    for gap, distances, reason in zip(found.gaps, found.distances, found.reasons, strict=True):
        records += [
            Record("", "repeated", distance, {"gap": gap, "layer": layer}, count=found.nouns)
            for layer, distance in enumerate(distances)
        ]
        if reason is not None:
            records.append(Record("", "repeated", None, {"gap": gap}, note=f"gap {gap}: {reason}"))
    return records


def _roles(found: RoleSwaps) -> list[Record]:
    return [
        Record("", quantity, value, {"layer": layer}, count=found.pairs)
        for quantity, values in (("word_role", found.word), ("roles", found.sentence))
        for layer, value in enumerate(values)
    ]


def _shuffled(found: PermutedContext) -> list[Record]:
    records = [] if found.loss is None else [Record("", "loss", found.loss, count=found.windows)]
    for one in found.permutations:
        name, at = ("shuffled", {}) if one.within is None else ("shuffled_block", {"block": one.within})
        records.append(Record("", name, one.output_change, at, count=found.windows))
        if one.loss_change is not None:
            records.append(Record("", f"{name}_loss", one.loss_change, at, count=found.windows))
    return records


def _shifted(found: ShiftedPositions) -> list[Record]:
    return [
        Record(
            "", "shift", one.change, {"offset": one.offset}, note=f"+{one.offset}: {one.reason}" if one.reason else ""
        )
        if one.offset
        else Record("", "left_padding", one.change, {"tokens": one.padding})
        for one in found.shifts
    ]


def _explanation(repeated: RepeatedWords, roles: RoleSwaps, permuted: PermutedContext, *, causal: bool) -> str:
    whole = "the state of its last word" if causal else "the mean of its states"
    return (
        f"gap: distance of the two states of {repeated.nouns} repeated nouns, that many tokens apart. Roles: "
        f"{roles.pairs} sentences with subject and object exchanged, the word's own state and {whole}. Loss: that of "
        f"the last of {permuted.context + 1} tokens in {permuted.windows} windows, in nats. Shuffled: change of its "
        "output, and rise of its loss, when the tokens before it are shuffled, all or in blocks. +n: change of all "
        "outputs when n is added to every position, and left pad: when padding stands before the text."
    )


def _spread(gaps: list[int]) -> list[int]:
    """At most four gaps, evenly spread."""
    if len(gaps) <= _SHOWN_GAPS:
        return gaps
    steps = _SHOWN_GAPS - 1
    return [gaps[round(step * (len(gaps) - 1) / steps)] for step in range(_SHOWN_GAPS)]
