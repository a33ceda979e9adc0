"""Tasks that give the characters of the prompt back: as they are, backwards, in order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hf_posenc.metrics.generalization.task import LETTERS, SEPARATOR, Example, SyntheticTask, draw_text


class RepeatedCopyTask(SyntheticTask):
    """Copies one character as many times as it was shown: `bbbb=bbbb`.

    "Repeat single character" (rsc) of Kazemnejad et al., arXiv:2305.19466, section 5.1 and the results of its sanity
    check. The model has to count, and nothing else. There are 26 prompts of each length: a model that was trained on a
    length has seen all of them.
    """

    length_meaning: ClassVar[str] = "number of times the character stands in the prompt"

    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        text = draw_text(LETTERS, 1, generator) * length
        return Example(text + SEPARATOR, text)

    def prompt_count(self, length: int) -> int:
        """One per letter."""
        return len(LETTERS)

    def character_count(self, length: int) -> int:
        """Prompt, separator, answer."""
        return 2 * length + 1


class _TextTask(SyntheticTask):
    """A random string and what becomes of it."""

    length_meaning: ClassVar[str] = "number of characters before the separator"

    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        text = draw_text(LETTERS, length, generator)
        return Example(text + SEPARATOR, self._answer(text))

    def _answer(self, text: str) -> str:
        raise NotImplementedError

    def prompt_count(self, length: int) -> int:
        """Every string of letters."""
        return len(LETTERS) ** length

    def character_count(self, length: int) -> int:
        """Prompt, separator, answer."""
        return 2 * length + 1


class CopyTask(_TextTask):
    """Copies a random string: `qkaz=qkaz`.

    The copy task of Kazemnejad et al., arXiv:2305.19466, section 3 ("cmc" in its results).
    """

    def _answer(self, text: str) -> str:
        return text


class ReverseTask(_TextTask):
    """Writes a random string backwards: `qkaz=zakq`.

    The reverse task of Kazemnejad et al., arXiv:2305.19466, section 3.
    """

    def _answer(self, text: str) -> str:
        return text[::-1]


class SortingTask(_TextTask):
    """Sorts letters, which may occur several times: `qkaz=akqz`.

    The sorting task of Kazemnejad et al., arXiv:2305.19466, section 3, in its form with one token per item; theirs
    sorts numbers.
    """

    def _answer(self, text: str) -> str:
        return "".join(sorted(text))
