"""Words that the measured sentences consist of, and a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Material:
    """Words to build sentences from. Only words that are one token for the tokenizer are used.

    Args:
        nouns: things that can occur twice in a text, and that can act on each other.
        verbs: what the nouns do to each other.
        fillers: words between the others.
        article: the word before a noun.
        another: the word before a noun that was named before.
        closing: the last word of a sentence.
        passage: a text to shuffle, of a few hundred words.
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
