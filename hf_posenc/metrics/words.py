"""Where a word stands among the tokens of a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError


@dataclass(frozen=True)
class TokenizedPair:
    """A sentence and the tokens of the first two occurrences of a word in it.

    Args:
        input_ids: `(1, length)` int64, special tokens included.
        first: indices of the tokens of the first occurrence.
        second: indices of the tokens of the second one; the same token ids as the first.
        tokens: the tokens as text.
    """

    input_ids: Tensor
    first: tuple[int, ...]
    second: tuple[int, ...]
    tokens: tuple[str, ...]


def tokenize_pair(tokenizer: Any, sentence: str, word: str) -> TokenizedPair:
    """Tokenizes a sentence and finds the first two occurrences of a word, of one token each or of several.

    Args:
        tokenizer: any transformers tokenizer. A fast one is asked where in the text its tokens come from; for a
            slow one the word's own tokens, with and without a space before it, are searched for.
        sentence: a sentence in which the word occurs at least twice.
        word: matched as a whole word, in upper or lower case.

    Raises:
        MeasurementError: if the word does not occur twice, or its two occurrences are not the same tokens (as where
            only one is capitalised, or only one follows a space): such a pair differs without any positions.
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
            f"The two occurrences of {word!r} in {sentence!r} are different tokens, {described}, and so differ "
            f"without any positions. Choose a sentence in which both are written alike and both follow a space."
        )
    return TokenizedPair(torch.tensor([ids]), first, second, tokens)


def _spans(sentence: str, word: str) -> list[tuple[int, int]]:
    """Where the word stands in the text; inside longer words only if the script has no spaces to tell by."""
    if not word.strip():
        raise MeasurementError("The word to look for is empty.")
    whole = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", sentence, re.IGNORECASE)]
    if len(whole) >= 2 or word.isascii():
        return whole
    return [match.span() for match in re.finditer(re.escape(word), sentence)]


def _search(ids: list[int], tokenizer: Any, written: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first two places that hold the tokens of the word as it is written in the sentence."""
    found: list[tuple[int, ...]] = []
    for text in dict.fromkeys(prefix + word for prefix in (" ", "") for word in written):
        needle = tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start in range(len(ids)) if needle and ids[start : start + len(needle)] == needle]
        places = [tuple(range(start, start + len(needle))) for start in starts]
        if len(places) >= 2:
            return places[0], places[1]
        found += places
    return (found[0], found[1]) if len(found) >= 2 else ((), ())
