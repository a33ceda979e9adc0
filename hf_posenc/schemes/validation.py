"""Checks for config constructors. Each error names the field, the value found and what is expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnknownNameError
from hf_posenc.schemes.limits import LARGEST_FACTOR, LARGEST_LENGTH, MOST_NUMBERS, SMALLEST_FACTOR, shown
from hf_posenc.schemes.option_types import EXACT_INTEGERS

#: With a smaller base, the product of a frequency and a 64-bit position can overflow float32.
SMALLEST_BASE = 1e-18
#: With a larger base, frequencies underflow to zero in float32.
LARGEST_BASE = 1e30
#: The frequency of the smallest base, in radians per position.
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
    """Checks that a field is an `int` or `float` (not a `bool`) within `[minimum, maximum]` and greater than `above`.

    Without `minimum` and `above`, the value may be negative, down to `-maximum`. Integers that float64 cannot represent
    exactly are converted to floats, because tensors do not accept larger integers.

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
    """Checks that a field is a nonzero number. It is the factor of everything that a scheme adds, and may be negative.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field)
    value = getattr(config, field)
    if value == 0:
        message = _message(config, field, value, "a number other than 0")
        raise ValueError(f"{message} A scheme with factor 0 adds nothing: use the scheme 'none'.")
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
    """Checks that a field is an `int` (not a `bool`) within `[minimum, maximum]`.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if value is None and optional:
        return
    if not isinstance(value, int) or not _is_number(value, minimum, None, maximum):
        raise ValueError(_message(config, field, value, "an integer" + _range_words(minimum, None, maximum)))


def check_integers(config: object, field: str, *, minimum: int, least: int = 0, most: int = MOST_NUMBERS) -> None:
    """Checks that a field is a sequence of integers within `[minimum, LARGEST_LENGTH]`, and stores it as a tuple.

    Args:
        config: the config with the field.
        field: name of the field.
        minimum: the smallest allowed value of each integer.
        least: minimum number of integers.
        most: maximum number of integers.

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
    """Checks that a field is a positive base whose frequencies are representable in float32 at every position.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field, above=0, maximum=LARGEST_BASE, optional=optional)
    value = getattr(config, field)
    if value is not None and value < SMALLEST_BASE:
        expected = f"at least {SMALLEST_BASE}, so that positions times its frequencies are finite in float32"
        raise ValueError(_message(config, field, value, expected))


def check_boolean(config: object, field: str, *, optional: bool = False) -> None:
    """Checks that a field is `True` or `False`, or `None` if `optional`.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if isinstance(value, bool) or (value is None and optional):
        return
    raise ValueError(_message(config, field, value, "True or False" + (" or None" if optional else "")))


def check_choice(config: object, field: str, choices: Iterable[str]) -> None:
    """Checks that a field is one of `choices`.

    Raises:
        UnknownNameError: for any other value; the message suggests the closest choice.
    """
    value = getattr(config, field)
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        name = value if isinstance(value, str) else shown(value)
        raise UnknownNameError(f"{type(config).__name__}.{field}", name, choices)


def check_numbers(config: object, field: str, *, minimum: float, maximum: float = LARGEST_FACTOR) -> None:
    """Checks that a field is a non-empty sequence of numbers within `[minimum, maximum]`, and stores it as a tuple.

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
    """Raises an error if a position is `limit` or greater.

    The check reads values, so it is skipped when there are none (compilation, graph capture, the meta device).

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
    """Checks that positions or distances are integers, and returns them unchanged.

    Raises:
        ValueError: for floating-point numbers.
    """
    if ids.is_floating_point():
        raise ValueError(
            f"The scheme {scheme!r} needs integer positions, but these are floating-point ({ids.dtype}). Pass integer "
            "positions, or use a scheme that accepts real positions, such as 'rope', 'alibi' or 'sinusoidal'."
        )
    return ids


def _is_number(value: Any, minimum: float | None, above: float | None, maximum: float) -> bool:
    # Comparisons are false for NaN, and exact for integers that a float cannot represent.
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
