"""Tasks that look something up in a long context: a passkey in noise, one of many keys."""

from __future__ import annotations

import string
from typing import ClassVar

import numpy as np

from hf_posenc.metrics.generalization.task import DIGITS, LETTERS, SEPARATOR, Example, SyntheticTask, draw_text

_KEY_DIGITS = 4
_VALUE_DIGITS = 2


class PasskeyTask(SyntheticTask):
    """Finds a number of four digits at a random depth of random letters: `qkz#4821mab=4821`.

    Passkey retrieval of Mohtashami and Jaggi, arXiv:2305.16300, section 4.2, on characters instead of English
    sentences, so that a small model can learn it from nothing.
    """

    length_meaning: ClassVar[str] = "number of letters around the passkey"

    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        filler = draw_text(LETTERS, length, generator)
        depth = int(generator.integers(length + 1))
        passkey = draw_text(DIGITS, _KEY_DIGITS, generator)
        return Example(f"{filler[:depth]}#{passkey}{filler[depth:]}{SEPARATOR}", passkey)

    def prompt_count(self, length: int) -> int:
        """Every filler, depth and passkey."""
        return int(len(LETTERS) ** length) * (length + 1) * 10**_KEY_DIGITS

    def character_count(self, length: int) -> int:
        """Filler, marker, passkey, separator, passkey."""
        return length + 2 + 2 * _KEY_DIGITS


class NeedleTask(SyntheticTask):
    """Finds the value of one key among many: `k07Q31z55?Q=31`.

    The needle in a haystack whose hay is made of needles: multi-key retrieval of RULER, arXiv:2404.06654, section 3,
    with a letter for a key and two digits for its value. A guess among the values shown is right once in `length`.
    """

    length_meaning: ClassVar[str] = "number of keys"
    longest: ClassVar[int | None] = len(string.ascii_letters)

    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        keys = [string.ascii_letters[index] for index in generator.permutation(len(string.ascii_letters))[:length]]
        values = [draw_text(DIGITS, _VALUE_DIGITS, generator) for _ in keys]
        wanted = int(generator.integers(length))
        pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
        return Example(f"{pairs}?{keys[wanted]}{SEPARATOR}", values[wanted])

    def prompt_count(self, length: int) -> int:
        """Every order of keys, every value, every question."""
        count = length
        for taken in range(length):
            count *= (len(string.ascii_letters) - taken) * 10**_VALUE_DIGITS
        return count

    def character_count(self, length: int) -> int:
        """Pairs, question, separator, value."""
        return length * (1 + _VALUE_DIGITS) + 3 + _VALUE_DIGITS
