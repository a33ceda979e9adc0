"""The dog test: does a model distinguish the two dogs in "The dog chased another dog"?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.evaluation import config_in_force, evaluation_result, measure_schemes
from hf_posenc.metrics.forward import check_vocabulary, is_causal, is_encoder_decoder, outputs_of, rounding
from hf_posenc.metrics.probe import AttentionProbe, probe_distance, probe_heads
from hf_posenc.metrics.statistics import cosine_distance, relative_l2
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

SENTENCE = "The dog chased another dog"
WORD = "dog"

#: A distance in the probe up to this one is rounding. The probe computes in float64, and without positions the
#: distance is exactly 0. The rest is the rounding of the scheme's float32 numbers.
PROBE_TOLERANCE = 1e-9
#: The number of layers in the table.
SHOWN_LAYERS = 8

_CAUSAL_NOTE = (
    "The model is causal: the two occurrences see different prefixes, so from layer 1 on the mask alone distinguishes "
    "them, with or without positions. The probe has no mask and shows what the scheme adds."
)
_ENCODER_NOTE = "Measured on the encoder of an encoder-decoder model."
_PROBE_MEANING = (
    "probe: the distance after one random attention layer without a mask, which reads the same embeddings. Without "
    "positions it is 0."
)


def dog_test(
    model: Any,
    tokenizer: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    sentence: str = SENTENCE,
    word: str = WORD,
    *,
    seed: int = 0,
) -> Result:
    """Measures how different two occurrences of the same word are in a model.

    An encoder without positions cannot distinguish the two: equal tokens attend to the same set of tokens, and stay
    equal in every layer. Only the position encoding can make them differ. In a causal model the mask does so too,
    because it shows each occurrence a different prefix. The scheme is therefore also measured in a random attention
    layer without a mask, over the same embeddings (`AttentionProbe`).

    The model is left unchanged, also after an error: scheme and weights, mode of every module, dtype and random state.
    The scheme of a patched model is removed and restored with its learned parameters.

    Args:
        model: any transformers model, patched or not. For an encoder-decoder, the encoder is measured.
        tokenizer: its tokenizer.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        sentence: a sentence in which `word` occurs twice.
        word: a word of one token or several; see `tokenize_pair`.
        seed: seed of the probe and of newly created scheme weights.

    Returns:
        Records of these quantities:

        - `relative_l2` and `cosine`, by `layer` (0: the embeddings): distance between the two hidden states.
        - `probe`: the relative L2 distance in the random attention layer.
        - `identical`: passed if no distance in the model is larger than rounding (`settings["tolerance"]`).
        - `told_apart`: passed if positions distinguish the two: in the model, or in the probe if the model is causal.

        If the architecture cannot take a scheme, the `error` of its subject has the reason, and it has no records.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if the word does not occur twice in the sentence as the same tokens, the tokenizer does not
            belong to the model, or a scheme given by name needs options.
        UnsupportedError: if the model returns no hidden states.
    """
    pair = tokenize_pair(tokenizer, sentence, word)
    first, second = list(pair.first), list(pair.second)
    embeddings = _embeddings(model, pair.input_ids)
    probe = AttentionProbe(embeddings.shape[-1], probe_heads(embeddings.shape[-1]), seed=seed)

    def measure(model: Any) -> list[Record]:
        states = outputs_of(model, pair.input_ids).states
        distances, largest = distances_by_layer([(state[0, first], state[0, second]) for state in states])
        identical = largest <= rounding(states[0].dtype)
        config, in_probe, refusal = config_in_force(model), None, ""
        if config is not None:
            try:
                in_probe = probe_distance(probe, embeddings, pair.first, pair.second, config, seed=seed)
            except ValueError as error:
                refusal = f"The probe could not run: {error}"
        told_apart: bool | None = not identical
        if causal:
            told_apart = None if in_probe is None else in_probe > PROBE_TOLERANCE
        return [
            *distances,
            Record("", "probe", in_probe, note=refusal),
            Record("", "identical", passed=identical),
            Record("", "told_apart", passed=told_apart),
        ]

    causal = is_causal(model, pair.input_ids, pair.first[-1])
    distance, cosine, apart = distance_quantities(f"the two {word!r}", "vectors", "the embeddings")
    return evaluation_result(
        "dog",
        f": how different the two {word!r} of {sentence!r} are",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        (
            Quantity("probe", "probe", _PROBE_MEANING),
            distance,
            cosine,
            Quantity("identical", "identical", style="verdict"),
            apart,
        ),
        views=(View(("probe", "relative_l2", "told_apart")),),
        layers=SHOWN_LAYERS,
        settings={
            "sentence": sentence,
            "word": word,
            "causal": causal,
            "tolerance": rounding(embeddings.dtype),
            "seed": seed,
        },
        of_model={
            "tokens": list(pair.tokens),
            "first": first,
            "second": second,
            "probe_without_positions": probe_distance(probe, embeddings, pair.first, pair.second),
        },
        remarks=(
            *([_CAUSAL_NOTE] if causal else []),
            *([_ENCODER_NOTE] if is_encoder_decoder(model) else []),
        ),
    )


def distances_by_layer(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Record], float]:
    """Returns records of `relative_l2` and `cosine` for the two states in each layer, and the largest `relative_l2`."""
    records = [
        Record("", name, distance(*both), {"layer": layer})
        for name, distance in (("relative_l2", relative_l2), ("cosine", cosine_distance))
        for layer, both in enumerate(states)
    ]
    return records, max(record.value or 0.0 for record in records if record.quantity == "relative_l2")


def distance_quantities(both: str, states: str, first: str) -> tuple[Quantity, Quantity, Quantity]:
    """Returns `relative_l2`, `cosine` and `told_apart` for the `states` of `both`, such as "the two dogs"."""
    meaning = f"layer: distance between the model's {states} of {both}, as a share of their length; layer 0 is {first}."
    return (
        Quantity("relative_l2", "layer {layer}", meaning),
        Quantity("cosine", "layer {layer}, cosine"),
        Quantity("told_apart", "apart", f"apart: whether positions tell {both} apart.", style="verdict"),
    )


def _embeddings(model: Any, input_ids: Tensor) -> Tensor:
    """Returns the token embeddings of one sentence without positions, `(length, hidden)` on the CPU.

    They are read from the table without calling its module, because a patch may add positions there.
    """
    check_vocabulary(model, *input_ids[0].tolist())
    table = model.get_input_embeddings()
    with torch.no_grad():
        vectors = table.weight[input_ids[0].to(table.weight.device)].cpu()
        return vectors * torch.as_tensor(getattr(table, "embed_scale", 1.0)).cpu()


@dataclass(frozen=True)
class TokenizedPair:
    """A sentence and the tokens of the first two occurrences of a word in it.

    Args:
        input_ids: `(1, length)` int64, including special tokens.
        first: indices of the tokens of the first occurrence.
        second: indices of the tokens of the second occurrence; the same token ids as the first.
        tokens: the tokens as text.
    """

    input_ids: Tensor
    first: tuple[int, ...]
    second: tuple[int, ...]
    tokens: tuple[str, ...]


def tokenize_pair(tokenizer: Any, sentence: str, word: str) -> TokenizedPair:
    """Tokenizes a sentence and finds the first two occurrences of a word of one or several tokens.

    Args:
        tokenizer: any transformers tokenizer. A fast one reports the place of each token in the text. For a slow one,
            the tokens of the word are searched for, with and without a space before it.
        sentence: a sentence in which the word occurs at least twice.
        word: matched as a whole word, in upper or lower case.

    Raises:
        MeasurementError: if the word does not occur twice, or its two occurrences are different tokens, for example
            because only one is capitalised or follows a space. Such a pair differs even without positions.
    """
    spans = _spans(sentence, word)
    if len(spans) < 2:
        raise MeasurementError(
            f"The word {word!r} must occur twice in the sentence; in {sentence!r} it occurs {len(spans)} times."
        )
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(sentence, return_offsets_mapping=True, return_special_tokens_mask=True)
        ids = list(encoded["input_ids"])
        places = list(enumerate(zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)))
        first, second = (
            tuple(place for place, ((start, end), special) in places if not special and start < stop and end > begin)
            for begin, stop in spans[:2]
        )
    else:
        ids = list(tokenizer(sentence)["input_ids"])
        first, second = _search(ids, tokenizer, [sentence[start:end] for start, end in spans[:2]])
    tokens = tuple(tokenizer.convert_ids_to_tokens(ids))
    if not first or [ids[index] for index in first] != [ids[index] for index in second]:
        described = " and ".join(str([tokens[index] for index in part]) for part in (first, second))
        raise MeasurementError(
            f"The two occurrences of {word!r} in {sentence!r} are different tokens, {described}, so they differ even "
            f"without positions. Choose a sentence in which both are written the same way and both follow a space."
        )
    return TokenizedPair(torch.tensor([ids]), first, second, tokens)


def _spans(sentence: str, word: str) -> list[tuple[int, int]]:
    """Returns where the word is in the text. Parts of longer words count only if the script has no spaces."""
    if not word.strip():
        raise MeasurementError("The word to look for is empty.")
    whole = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", sentence, re.IGNORECASE)]
    if len(whole) >= 2 or word.isascii():
        return whole
    return [match.span() for match in re.finditer(re.escape(word), sentence)]


def _search(ids: list[int], tokenizer: Any, written: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the first two places of the word's tokens, for the word as it is written in the sentence."""
    single: list[tuple[int, ...]] = []
    for text in dict.fromkeys(prefix + word for prefix in (" ", "") for word in written):
        needle = tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start in range(len(ids)) if needle and ids[start : start + len(needle)] == needle]
        places = [tuple(range(start, start + len(needle))) for start in starts]
        if len(places) >= 2:
            return places[0], places[1]
        single += places
    return (single[0], single[1]) if len(single) >= 2 else ((), ())
