"""Who does what to whom: "the dog sees the pig" and "the pig sees the dog"."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.metrics.sensitivity.material import TokenizedMaterial
from hf_posenc.metrics.sensitivity.outputs import outputs_of, relative_changes


@dataclass(frozen=True)
class RoleSwaps:
    """What exchanging subject and object does.

    Args:
        pairs: how many pairs of sentences the numbers are means of.
        word: relative L2 distance of a noun's state as the subject from its state as the object, at every layer,
            embeddings first.
        sentence: that of the whole sentence's representation: the mean of its states, or in a causal model the state
            of its last word, which sees all others and is the same in both sentences.
        logits: that of the logits at the last word of a causal model with logits; else `None`.
    """

    pairs: int
    word: tuple[float, ...]
    sentence: tuple[float, ...]
    logits: float | None


def role_swaps(model: Any, tokens: TokenizedMaterial, *, causal: bool) -> RoleSwaps:
    """Compares sentences that hold the same words, with subject and object exchanged.

    An encoder without positions sees a set of words: each noun has exactly the same state in both sentences, and both
    sentences have the same representation.

    Args:
        model: any transformers model.
        tokens: the words; every two nouns meet once, with the verbs in turn.
        causal: whether a token sees only those before it.
    """
    pairs = list(itertools.combinations(tokens.nouns, 2))
    verbs = [tokens.verbs[index % len(tokens.verbs)] for index in range(len(pairs))]
    sentences = [
        tokens.sentences(
            [
                [tokens.article, subject, verb, tokens.article, target, tokens.closing]
                for (subject, target), verb in zip(ordered, verbs, strict=True)
            ]
        )
        for ordered in (pairs, [(second, first) for first, second in pairs])
    ]
    start = len(tokens.frame.before)
    subject, target, last = start + 1, start + 4, start + 5
    here, there = (outputs_of(model, batch) for batch in sentences)
    word, sentence = [], []
    for one, other in zip(here.states, there.states, strict=True):
        both = torch.cat(
            [relative_changes(one[:, subject], other[:, target]), relative_changes(one[:, target], other[:, subject])]
        )
        word.append(float(both.mean()))
        whole = (one[:, last], other[:, last]) if causal else (one.double().mean(dim=1), other.double().mean(dim=1))
        sentence.append(float(relative_changes(*whole).mean()))
    logits = None
    if causal and here.logits is not None and there.logits is not None:
        logits = float(relative_changes(here.logits[:, last], there.logits[:, last]).mean())
    return RoleSwaps(len(pairs), tuple(word), tuple(sentence), logits)
