"""Tasks that compute: addition and parity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_posenc.metrics.generalization.task import DIGITS, SEPARATOR, Example, SyntheticTask, draw_text


@dataclass(frozen=True)
class AdditionTask(SyntheticTask):
    """Adds two numbers of equally many digits: `47+85=132`.

    The addition task of Kazemnejad et al., arXiv:2305.19466, section 3, without a scratchpad. Written in the usual
    order, the first digit of the sum depends on every carry; with `reversed_answer` the sum starts with its units
    (`47+85=231`), which small models learn far sooner (Lee et al., arXiv:2307.03381, section 3).

    Args:
        reversed_answer: write the digits of the sum from the units on.
    """

    length_meaning: ClassVar[str] = "number of digits of each of the two numbers"
    reversed_answer: bool = False

    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        first, second = (self._number(length, generator) for _ in range(2))
        total = str(int(first) + int(second))
        return Example(f"{first}+{second}{SEPARATOR}", total[::-1] if self.reversed_answer else total)

    @staticmethod
    def _number(length: int, generator: np.random.Generator) -> str:
        """A number without leading zeros."""
        if length == 1:
            return draw_text(DIGITS, 1, generator)
        return draw_text(DIGITS[1:], 1, generator) + draw_text(DIGITS, length - 1, generator)

    def prompt_count(self, length: int) -> int:
        """Every pair of numbers."""
        return 100 if length == 1 else (9 * 10 ** (length - 1)) ** 2

    def character_count(self, length: int) -> int:
        """Both numbers, plus, separator, and a sum that may have one digit more."""
        return 3 * length + 3


class ParityTask(SyntheticTask):
    """Whether the number of ones among bits is odd: `10110=1`.

    The parity task of Kazemnejad et al., arXiv:2305.19466, section 3, without a scratchpad (and of Anil et al.,
    arXiv:2207.04901, section 3). The answer is one bit: a blind guess is right half of the time.
    """

    length_meaning: ClassVar[str] = "number of bits"
    chance: ClassVar[float] = 0.5

    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        bits = draw_text("01", length, generator)
        return Example(bits + SEPARATOR, str(bits.count("1") % 2))

    def prompt_count(self, length: int) -> int:
        """Every string of bits."""
        return int(2**length)

    def character_count(self, length: int) -> int:
        """Bits, separator, one bit."""
        return length + 2
