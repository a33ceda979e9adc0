"""The dog test at many distances: how far apart are the states of two equal words?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.sensitivity.material import TokenizedMaterial
from hf_posenc.metrics.sensitivity.outputs import outputs_of, relative_changes

GAPS = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class RepeatedWords:
    """Distances of the two occurrences of a word.

    Args:
        nouns: how many words the distances are means of.
        gaps: tokens from one occurrence to the other.
        distances: for each gap the mean relative L2 distance at every layer, embeddings first; empty where the
            sequence is longer than the encoding can represent.
        reasons: why a gap has no distances, or `None`, one per gap.
    """

    nouns: int
    gaps: tuple[int, ...]
    distances: tuple[tuple[float, ...], ...]
    reasons: tuple[str | None, ...]

    def at(self, gap: int) -> float | None:
        """The distance behind the last layer; `None` if there is none.

        Raises:
            KeyError: if the gap was not measured.
        """
        if gap not in self.gaps:
            raise KeyError(f"No gap of {gap}; the gaps are {list(self.gaps)}.")
        layers = self.distances[self.gaps.index(gap)]
        return layers[-1] if layers else None


def repeated_words(model: Any, tokens: TokenizedMaterial, gaps: Sequence[int] = GAPS) -> RepeatedWords:
    """Measures "the dog and then with ... another dog" with more and more words in between, for every noun.

    An encoder without positions holds the two for exactly the same at any gap: equal tokens attend to the same set of
    tokens. In a causal model the mask shows each another prefix, and the two differ without any positions.

    Args:
        model: any transformers model.
        tokens: the words.
        gaps: tokens from one occurrence to the other, at least 2.

    Raises:
        MeasurementError: for a gap below 2.
    """
    if not gaps or min(gaps) < 2:
        raise MeasurementError(f"A gap is at least 2, for the word before the second noun; got {list(gaps)}.")
    distances: list[tuple[float, ...]] = []
    reasons: list[str | None] = []
    for gap in sorted(set(gaps)):
        sentences, first = repeated_sentences(tokens, gap)
        try:
            states = outputs_of(model, sentences).states
        except SequenceLengthError as error:
            distances.append(())
            reasons.append(str(error))
            continue
        distances.append(tuple(float(relative_changes(s[:, first], s[:, first + gap]).mean()) for s in states))
        reasons.append(None)
    return RepeatedWords(len(tokens.nouns), tuple(sorted(set(gaps))), tuple(distances), tuple(reasons))


def repeated_sentences(tokens: TokenizedMaterial, gap: int) -> tuple[Tensor, int]:
    """One sentence per noun `(nouns, length)`, and where the noun first stands; the second stands `gap` behind."""
    between = [tokens.fillers[index % len(tokens.fillers)] for index in range(gap - 2)]
    words = [[tokens.article, noun, *between, tokens.another, noun] for noun in tokens.nouns]
    sentences = tokens.sentences(words)
    first = len(tokens.frame.before) + 1
    assert bool(torch.equal(sentences[:, first], sentences[:, first + gap]))
    return sentences, first
