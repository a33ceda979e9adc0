"""Checks shared by the config constructors: each error names the field, the value found, and what is expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnknownNameError
from hf_posenc.schemes.limits import LARGEST_FACTOR, LARGEST_LENGTH, MOST_NUMBERS, SMALLEST_FACTOR, shown
from hf_posenc.schemes.option_types import EXACT_INTEGERS

#: A base below this one has frequencies that float32 cannot hold once they are multiplied with any 64-bit position.
SMALLEST_BASE = 1e-18
#: A base above this one has frequencies that are zero in float32.
LARGEST_BASE = 1e30
#: The frequency, in radians per position, that belongs to the smallest base.
LARGEST_FREQUENCY = 1e18


def check_number(
    config: object,
    field: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float = LARGEST_FACTOR,
    optional: bool = False,
) -> None:
    """Requires an `int` or `float` (not a `bool`) within `[minimum, maximum]` and greater than `above`.

    Without `minimum` and `above` it may be negative, down to `-maximum`. Integers that float64 does not hold exactly
    become floats: tensors take no larger ones.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if value is None and optional:
        return
    if minimum is None and above is None:
        minimum = -maximum
    if not _is_number(value, minimum, above, maximum):
        raise ValueError(_message(config, field, value, "a finite number" + _range_words(minimum, above, maximum)))
    if isinstance(value, int) and abs(value) > EXACT_INTEGERS:
        object.__setattr__(config, field, float(value))


def check_strength(config: object, field: str) -> None:
    """Requires a number other than 0, for the factor of all that a scheme adds; it may be negative.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field)
    value = getattr(config, field)
    if value == 0:
        message = _message(config, field, value, "a number other than 0")
        raise ValueError(f"{message} With 0 nothing is added, which is the scheme 'none'.")
    if abs(value) < SMALLEST_FACTOR:
        raise ValueError(_message(config, field, value, f"at least {SMALLEST_FACTOR} in magnitude"))


def check_integer(
    config: object,
    field: str,
    *,
    minimum: int | None = None,
    maximum: int = LARGEST_LENGTH,
    optional: bool = False,
) -> None:
    """Requires an `int` (not a `bool`) within `[minimum, maximum]`.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if value is None and optional:
        return
    if not isinstance(value, int) or not _is_number(value, minimum, None, maximum):
        raise ValueError(_message(config, field, value, "an integer" + _range_words(minimum, None, maximum)))


def check_integers(config: object, field: str, *, minimum: int, least: int = 0, most: int = MOST_NUMBERS) -> None:
    """Requires a sequence of integers within `[minimum, LARGEST_LENGTH]`, and stores it as a tuple.

    Args:
        config: holds the sequence.
        field: where.
        minimum: of each integer.
        least: how many there have to be.
        most: how many there may be.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if (
        not isinstance(value, tuple | list)
        or not least <= len(value) <= most
        or not all(isinstance(item, int) and _is_number(item, minimum, None, LARGEST_LENGTH) for item in value)
    ):
        count = str(most) if least == most else f"{least} to {most}"
        expected = f"a sequence of {count} integers, each" + _range_words(minimum, None, LARGEST_LENGTH)
        raise ValueError(_message(config, field, value, expected))
    object.__setattr__(config, field, tuple(value))


def check_base(config: object, field: str, *, optional: bool = False) -> None:
    """Requires a number greater than 0 whose powers make frequencies that float32 can hold at every position.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field, above=0, maximum=LARGEST_BASE, optional=optional)
    value = getattr(config, field)
    if value is not None and value < SMALLEST_BASE:
        expected = f"at least {SMALLEST_BASE}, so that positions times its frequencies are finite in float32"
        raise ValueError(_message(config, field, value, expected))


def check_boolean(config: object, field: str, *, optional: bool = False) -> None:
    """Requires `True` or `False`, or `None` where `optional`.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if isinstance(value, bool) or (value is None and optional):
        return
    raise ValueError(_message(config, field, value, "True or False" + (" or None" if optional else "")))


def check_choice(config: object, field: str, choices: Iterable[str]) -> None:
    """Requires one of `choices`.

    Raises:
        UnknownNameError: with the nearest choice, for any other value.
    """
    value = getattr(config, field)
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        name = value if isinstance(value, str) else shown(value)
        raise UnknownNameError(f"{type(config).__name__}.{field}", name, choices)


def check_numbers(config: object, field: str, *, minimum: float, maximum: float = LARGEST_FACTOR) -> None:
    """Requires a non-empty sequence of numbers within `[minimum, maximum]`, and stores it as a tuple.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if (
        not isinstance(value, tuple | list)
        or not 0 < len(value) <= MOST_NUMBERS
        or not all(_is_number(item, minimum, None, maximum) for item in value)
    ):
        expected = f"a non-empty sequence of at most {MOST_NUMBERS} finite numbers, each"
        raise ValueError(_message(config, field, value, expected + _range_words(minimum, None, maximum)))
    object.__setattr__(config, field, tuple(value))


def check_positions_below(ids: Tensor, limit: int, remedy: str) -> None:
    """Refuses positions at or past `limit`.

    Reading the maximum needs the values, so the check is left out where only a trace of them exists (compilation,
    graph capture, the meta device).

    Raises:
        SequenceLengthError: naming the length found, the limit and the remedy.
    """
    if torch.compiler.is_compiling() or ids.is_meta or ids.numel() == 0:
        return
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    length = int(ids.max()) + 1
    if length > limit:
        raise SequenceLengthError(f"A sequence of length {length} is longer than the {limit} positions {remedy}")


def whole_positions(ids: Tensor, scheme: str) -> Tensor:
    """Positions or distances that have to be whole numbers, returned as they are.

    Raises:
        ValueError: for real numbers.
    """
    if ids.is_floating_point():
        raise ValueError(
            f"The scheme {scheme!r} needs whole positions, but these are real numbers ({ids.dtype}). Give whole ones, "
            "or use a scheme of real positions such as 'rope', 'alibi' or 'sinusoidal'."
        )
    return ids


def _is_number(value: Any, minimum: float | None, above: float | None, maximum: float) -> bool:
    # Comparisons are false for what is no number, and exact for integers that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= maximum:
        return False
    return (minimum is None or value >= minimum) and (above is None or value > above)


def _range_words(minimum: float | None, above: float | None, maximum: float) -> str:
    words = []
    if minimum is not None:
        words.append(f"at least {minimum}")
    if above is not None:
        words.append(f"greater than {above}")
    words.append(f"at most {maximum}")
    return " " + " and ".join(words)


def _message(config: object, field: str, value: Any, expected: str) -> str:
    return f"{type(config).__name__}.{field} is {shown(value)}; expected {expected}."
