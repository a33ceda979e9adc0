"""Synthetic tasks: short text problems of any length, each with one right answer."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_posenc.errors import MeasurementError, UnknownNameError

LETTERS = string.ascii_lowercase
DIGITS = string.digits
KEYS = string.ascii_letters
#: Ends every prompt. No task uses it elsewhere in a prompt or an answer.
SEPARATOR = "="
_PASSKEY_DIGITS = 4
_VALUE_DIGITS = 2


@dataclass(frozen=True)
class Example:
    """A problem and its solution, as text: a prompt that ends with `SEPARATOR`, and the right answer of a model."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class SyntheticTask:
    """A family of problems of every length: train on short ones, test on long ones.

    Tasks work on characters, so that with a tokenizer of bytes every symbol is one token.

    Args:
        name: name of the task in `SYNTHETIC_TASKS`.
        draw: draws one problem of a length that exists; all randomness comes from the generator.
        train_lengths: the lengths to train on by default.
        test_lengths: lengths to test on. Some are trained on, to separate failure to learn from failure to generalise.
        length_meaning: what the length of a problem counts.
        split_from: the shortest length with 256 different prompts or more; `None` if no length has so many.
        characters: `(each, more)`: the longest problem of a length has `each * length + more`, including the answer.
        chance: probability that a blind guess is right, if it is not close to 0.
        longest: length of the longest problem, or `None`.
    """

    name: str
    draw: Callable[[int, np.random.Generator], Example]
    train_lengths: tuple[int, ...]
    test_lengths: tuple[int, ...]
    length_meaning: str
    split_from: int | None
    characters: tuple[int, int]
    chance: float = 0.0
    longest: int | None = None

    def character_count(self, length: int) -> int:
        """Returns the characters of the longest problem of a length, prompt and answer together."""
        each, more = self.characters
        return each * length + more

    def example(self, length: int, generator: np.random.Generator) -> Example:
        """Draws one problem: the same state of the generator gives the same problem.

        Raises:
            MeasurementError: for a length that the task does not have.
        """
        self.check_length(length)
        return self.draw(length, generator)

    def check_length(self, length: int) -> None:
        """Raises `MeasurementError` for a length that the task does not have."""
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise MeasurementError(
                f"A length of the task {self.name!r} must be a whole number above 0; got {length!r}."
            )
        if self.longest is not None and length > self.longest:
            raise MeasurementError(
                f"The task {self.name!r} has no problems of length {length}: its length is the "
                f"{self.length_meaning}, at most {self.longest}."
            )


def draw_text(alphabet: str, length: int, generator: np.random.Generator) -> str:
    """Draws `length` characters from the alphabet, each with equal probability."""
    return "".join(alphabet[index] for index in generator.integers(len(alphabet), size=length))


def repeated_copy(length: int, generator: np.random.Generator) -> Example:
    """Copies one character as many times as it was shown: `bbbb=bbbb`.

    "Repeat single character" (rsc) of Kazemnejad et al., arXiv:2305.19466, section 5.1 and the results of its sanity
    check. The model only has to count. Each length has 26 prompts, so a model that was trained on it has seen them all.
    """
    text = draw_text(LETTERS, 1, generator) * length
    return Example(text + SEPARATOR, text)


def copy(length: int, generator: np.random.Generator) -> Example:
    """Copies a random string: `qkaz=qkaz`.

    The copy task of Kazemnejad et al., arXiv:2305.19466, section 3 ("cmc" in its results).
    """
    text = draw_text(LETTERS, length, generator)
    return Example(text + SEPARATOR, text)


def reverse(length: int, generator: np.random.Generator) -> Example:
    """Writes a random string backwards: `qkaz=zakq`.

    The reverse task of Kazemnejad et al., arXiv:2305.19466, section 3.
    """
    text = draw_text(LETTERS, length, generator)
    return Example(text + SEPARATOR, text[::-1])


def sorting(length: int, generator: np.random.Generator) -> Example:
    """Sorts letters, which may occur several times: `qkaz=akqz`.

    The sorting task of Kazemnejad et al., arXiv:2305.19466, section 3, with one token per item; theirs sorts numbers.
    """
    text = draw_text(LETTERS, length, generator)
    return Example(text + SEPARATOR, "".join(sorted(text)))


def addition(length: int, generator: np.random.Generator) -> Example:
    """Adds two numbers with the same number of digits: `47+85=132`.

    The addition task of Kazemnejad et al., arXiv:2305.19466, section 3, without a scratchpad. In the usual order of
    digits, the first digit of the sum depends on every carry.
    """
    numbers = []
    for _ in range(2):
        # No leading zeros.
        first = draw_text(DIGITS if length == 1 else DIGITS[1:], 1, generator)
        numbers.append(first if length == 1 else first + draw_text(DIGITS, length - 1, generator))
    return Example("+".join(numbers) + SEPARATOR, str(sum(map(int, numbers))))


def reversed_addition(length: int, generator: np.random.Generator) -> Example:
    """Adds two numbers and writes the sum from its last digit to its first: `47+85=231`.

    Small models learn it much sooner (Lee et al., arXiv:2307.03381, section 3).
    """
    example = addition(length, generator)
    return Example(example.prompt, example.answer[::-1])


def parity(length: int, generator: np.random.Generator) -> Example:
    """Answers whether the number of ones among bits is odd: `10110=1`.

    The parity task of Kazemnejad et al., arXiv:2305.19466, section 3, without a scratchpad (and of Anil et al.,
    arXiv:2207.04901, section 3). The answer is one bit, so a blind guess is right half of the time.
    """
    bits = draw_text("01", length, generator)
    return Example(bits + SEPARATOR, str(bits.count("1") % 2))


def passkey(length: int, generator: np.random.Generator) -> Example:
    """Finds a number of four digits at a random depth of random letters: `qkz#4821mab=4821`.

    Passkey retrieval of Mohtashami and Jaggi, arXiv:2305.16300, section 4.2, on characters instead of English
    sentences, so that a small model can learn it from scratch.
    """
    filler = draw_text(LETTERS, length, generator)
    depth = int(generator.integers(length + 1))
    key = draw_text(DIGITS, _PASSKEY_DIGITS, generator)
    return Example(f"{filler[:depth]}#{key}{filler[depth:]}{SEPARATOR}", key)


def needle(length: int, generator: np.random.Generator) -> Example:
    """Finds the value of one key among many: `k07Q31z55?Q=31`.

    Multi-key retrieval of RULER, arXiv:2404.06654, section 3 (a needle in a haystack of needles), with a letter as the
    key and two digits as its value. A guess among the values shown is right with probability `1 / length`.
    """
    keys = [KEYS[index] for index in generator.permutation(len(KEYS))[:length]]
    values = [draw_text(DIGITS, _VALUE_DIGITS, generator) for _ in keys]
    wanted = int(generator.integers(length))
    pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
    return Example(f"{pairs}?{keys[wanted]}{SEPARATOR}", values[wanted])


_UP_TO_10, _BEYOND_10 = tuple(range(1, 11)), (5, 10, 11, 12, 13, 14, 16, 20, 30, 40)
_UP_TO_6, _BEYOND_6 = tuple(range(1, 7)), (3, 6, 7, 8, 9, 12, 16, 24)
_TIMES = "number of times the character stands in the prompt"
_CHARACTERS, _DIGITS = "number of characters before the separator", "number of digits of each of the two numbers"
_BITS, _AROUND, _KEYS = "number of bits", "number of letters around the passkey", "number of keys"
#: Every task by its name.
SYNTHETIC_TASKS: dict[str, SyntheticTask] = {
    task.name: task
    for task in (
        SyntheticTask("repeated_copy", repeated_copy, _UP_TO_10, _BEYOND_10, _TIMES, None, (2, 1)),
        SyntheticTask("copy", copy, _UP_TO_10, _BEYOND_10, _CHARACTERS, 2, (2, 1)),
        SyntheticTask("reverse", reverse, _UP_TO_10, _BEYOND_10, _CHARACTERS, 2, (2, 1)),
        SyntheticTask("sorting", sorting, _UP_TO_10, _BEYOND_10, _CHARACTERS, 2, (2, 1)),
        # The sum may have one more digit.
        SyntheticTask("addition", addition, _UP_TO_6, _BEYOND_6, _DIGITS, 2, (3, 3)),
        SyntheticTask("reversed_addition", reversed_addition, _UP_TO_6, _BEYOND_6, _DIGITS, 2, (3, 3)),
        SyntheticTask(
            "parity", parity, tuple(range(1, 21)), (10, 20, 21, 22, 25, 30, 40, 60, 80), _BITS, 8, (1, 2),
            chance=0.5,
        ),
        SyntheticTask(
            "passkey", passkey, tuple(range(4, 21)), (10, 20, 22, 25, 30, 40, 60, 80), _AROUND, 1,
            (1, 2 + 2 * _PASSKEY_DIGITS),
        ),
        SyntheticTask(
            "needle", needle, tuple(range(1, 9)), (4, 8, 9, 10, 12, 16, 24, 32), _KEYS, 1,
            (1 + _VALUE_DIGITS, 3 + _VALUE_DIGITS), longest=len(KEYS),
        ),
    )
}  # fmt: skip


def get_task(task: str | SyntheticTask) -> SyntheticTask:
    """Returns the task with this name; a task is returned as it is.

    Raises:
        UnknownNameError: if there is no task with this name.
    """
    if isinstance(task, SyntheticTask):
        return task
    if task not in SYNTHETIC_TASKS:
        raise UnknownNameError("synthetic task", task, SYNTHETIC_TASKS)
    return SYNTHETIC_TASKS[task]


def tested_lengths(task: SyntheticTask, lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths in ascending order, without duplicates.

    Raises:
        MeasurementError: if there are none, or the task does not have one of them.
    """
    if not lengths:
        raise MeasurementError(f"No lengths are given for the task {task.name!r}; it needs at least one.")
    for length in lengths:
        task.check_length(length)
    return tuple(sorted({int(length) for length in lengths}))
