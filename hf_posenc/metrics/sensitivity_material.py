"""The words that sentences are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.language_modeling.windows import Frame, special_frame, token_stream


@dataclass(frozen=True)
class Material:
    """Words to build sentences of. Only those are used that the tokenizer has as one token.

    Args:
        nouns: things that can be met twice, and that can do something to each other.
        verbs: what they do.
        fillers: words to stand in between.
        article: before a noun.
        another: before a noun that was named before.
        closing: the last word of a sentence.
        passage: a text to shuffle; a few hundred words.
    """

    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    fillers: tuple[str, ...]
    article: str
    another: str
    closing: str
    passage: str


ENGLISH = Material(
    nouns=("dog", "pig", "cat", "horse", "boy", "girl", "man", "woman", "teacher", "student", "doctor", "king"),
    verbs=("sees", "follows", "helps", "calls", "likes", "hears", "knows", "finds"),
    fillers=("and", "then", "with", "old", "small", "red", "house", "garden", "near", "over", "water", "road"),
    article="the",
    another="another",
    closing="today",
    passage=(
        "Every morning the ferry left the island at seven, carrying the children who went to school on the other "
        "side. The captain knew them all by name, and he also knew who had not done their homework, because those "
        "were the ones who sat in the back and wrote as fast as they could before the boat reached the harbour. In "
        "winter the crossing took longer. Ice formed along the shore, and the old engine had to work hard to push "
        "the hull through it. Once, many years ago, the ferry had been stuck for two days, and the people of the "
        "village had walked across the ice with bread, soup and blankets to bring everyone home. The captain liked "
        "to tell that story to visitors. He told it slowly, with long pauses, and each time the ice became a "
        "little thinner and the wind a little stronger. His daughter, who sold the tickets, only smiled. She had "
        "been there too, and what she remembered best was not the cold or the danger, but the sound of the church "
        "bell, which somebody rang every hour through both nights so that nobody would lose the way in the dark. "
        "When the new bridge opens next spring, the ferry will stop. The children will take a bus, and the trip "
        "will last ten minutes instead of forty. Most people are glad about it. The captain says that he is glad "
        "as well, but on quiet evenings he can be seen down at the pier, where he polishes the brass letters on "
        "the side of the boat until they shine."
    ),
)


@dataclass(frozen=True)
class TokenizedMaterial:
    """The same as token ids.

    Args:
        nouns: one id each.
        verbs: one id each.
        fillers: one id each.
        article: its id.
        another: its id.
        closing: its id.
        passage: `(tokens,)` int64.
        frame: special tokens around a sentence.
        mask_token_id: the id of the mask token, if there is one.
        pad_token_id: the id that stands at padding.
    """

    nouns: tuple[int, ...]
    verbs: tuple[int, ...]
    fillers: tuple[int, ...]
    article: int
    another: int
    closing: int
    passage: Tensor
    frame: Frame
    mask_token_id: int | None
    pad_token_id: int

    def sentences(self, words: list[list[int]]) -> Tensor:
        """`(sentences, length)` with special tokens, of sentences of equal length."""
        return self.frame.around(torch.tensor(words), targets=False)


def tokenize_material(tokenizer: Any, material: Material) -> TokenizedMaterial:
    """Looks up each word as it stands within a sentence, that is behind a space.

    Raises:
        MeasurementError: if too few of the words are one token.
    """
    words = {name: _single(tokenizer, getattr(material, name)) for name in ("nouns", "verbs", "fillers")}
    single = {name: _single(tokenizer, (getattr(material, name),)) for name in ("article", "another", "closing")}
    for name, needed in (("nouns", 3), ("verbs", 1), ("fillers", 2)):
        if len(words[name]) < needed:
            raise MeasurementError(
                f"The tokenizer has {len(words[name])} of the {name} {list(getattr(material, name))} as one token, and "
                f"at least {needed} are needed. Pass material=Material(...) with words of its language."
            )
    for name, found in single.items():
        if not found:
            raise MeasurementError(
                f"The tokenizer has no single token for the {name} {getattr(material, name)!r}. Pass "
                f"material=Material(...) with words of its language."
            )
    return TokenizedMaterial(
        nouns=words["nouns"],
        verbs=words["verbs"],
        fillers=words["fillers"],
        article=single["article"][0],
        another=single["another"][0],
        closing=single["closing"][0],
        passage=token_stream(tokenizer, [material.passage]),
        frame=special_frame(tokenizer, causal=False),
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


def _single(tokenizer: Any, words: tuple[str, ...]) -> tuple[int, ...]:
    encoded = [tokenizer(" " + word, add_special_tokens=False)["input_ids"] for word in words]
    known = [ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id]
    return tuple(dict.fromkeys(known))
