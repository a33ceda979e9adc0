"""What a synthetic task is: short text problems of any length, each with one right answer."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_posenc.metrics.errors import MeasurementError

LETTERS = string.ascii_lowercase
DIGITS = string.digits
#: Closes every prompt. No task uses it inside a prompt or an answer.
SEPARATOR = "="


@dataclass(frozen=True)
class Example:
    """A problem and its solution, as text.

    Args:
        prompt: what the model reads; ends with `SEPARATOR`.
        answer: what it has to continue with, before it ends the sequence.
    """

    prompt: str
    answer: str


@dataclass(frozen=True)
class SyntheticTask(ABC):
    """A family of problems that come in every length: train on short ones, test on long ones.

    Tasks work on characters, so that with a tokenizer of bytes every symbol is one token.

    Args:
        name: the task's name in `SYNTHETIC_TASKS`.
        train_lengths: the lengths to train on, unless somebody says otherwise.
        test_lengths: the lengths to test on; some of them were trained on, so that failing to learn and failing to
            generalise can be told apart.
    """

    name: str
    train_lengths: tuple[int, ...]
    test_lengths: tuple[int, ...]
    #: What the length of a problem counts.
    length_meaning: ClassVar[str]
    #: How often a blind guess is right, where that is not next to never.
    chance: ClassVar[float] = 0.0
    #: The longest problem there is, or `None`.
    longest: ClassVar[int | None] = None

    def example(self, length: int, generator: np.random.Generator) -> Example:
        """Draws one problem.

        Args:
            length: see `length_meaning`.
            generator: all randomness comes from it: an equal state gives an equal problem.

        Raises:
            MeasurementError: for a length that the task does not have.
        """
        self.check_length(length)
        return self._draw(length, generator)

    def check_length(self, length: int) -> None:
        """Raises `MeasurementError` for a length that the task does not have."""
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise MeasurementError(f"A length of the task {self.name!r} is a whole number from 1 on, got {length!r}.")
        if self.longest is not None and length > self.longest:
            raise MeasurementError(
                f"The task {self.name!r} has no problems of length {length}: its length is the "
                f"{self.length_meaning}, of which there are {self.longest} at most."
            )

    @abstractmethod
    def _draw(self, length: int, generator: np.random.Generator) -> Example:
        """`example`, for a length that exists."""

    @abstractmethod
    def prompt_count(self, length: int) -> int:
        """How many different prompts of this length there are."""

    @abstractmethod
    def character_count(self, length: int) -> int:
        """Characters of the longest problem of this length, prompt and answer together."""


def draw_text(alphabet: str, length: int, generator: np.random.Generator) -> str:
    """`length` characters, each drawn from the alphabet with equal probability."""
    return "".join(alphabet[index] for index in generator.integers(len(alphabet), size=length))


def check_lengths(task: SyntheticTask, lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths in ascending order, each once.

    Raises:
        MeasurementError: if there are none, or the task does not have one of them.
    """
    if not lengths:
        raise MeasurementError(f"No lengths are given for the task {task.name!r}; it needs one at least.")
    for length in lengths:
        task.check_length(length)
    return tuple(sorted({int(length) for length in lengths}))
