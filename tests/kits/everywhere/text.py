"""Real text: a speech of the packaged corpus."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.errors import BenchmarkError
from training.data.loading import packaged_folder

#: The longest text of the corpus.
SPEECH = "1981-Carter-1.txt"


def speech_tokens(source: Path) -> list[int]:
    """The ids of the text without special tokens, by the tokenizer of a checkpoint."""
    speech = (packaged_folder() / SPEECH).read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids: list[int] = tokenizer(speech, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def windows(tokens: list[int], count: int, length: int) -> list[list[int]]:
    """Pieces of one length, spread over a text.

    Raises:
        BenchmarkError: if the text is too short.
    """
    if len(tokens) < count * length:
        raise BenchmarkError(f"The text has {len(tokens)} tokens, too few for {count} pieces of {length}.")
    starts = [index * (len(tokens) - length) // max(1, count - 1) for index in range(count)]
    return [tokens[start : start + length] for start in starts]
