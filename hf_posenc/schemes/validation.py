"""Checks shared by the config constructors: each error names the field, the value found, and what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnknownNameError

#: The largest finite number of float32, which all parts compute in.
LARGEST_NUMBER = torch.finfo(torch.float32).max
#: The least and the largest integer that a tensor of positions can hold.
INTEGERS = range(-(2**63), 2**63)
#: A base below this one has frequencies that float32 cannot hold once they are multiplied with any 64-bit position.
SMALLEST_BASE = 1e-18


def check_number(
    config: object,
    field: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
) -> None:
    """Requires an `int` or `float` (not a `bool`) within `[minimum, maximum]` and greater than `above`.

    It has to be finite in float32.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if value is None and optional:
        return
    if not _is_number(value, minimum, above, maximum):
        expected = "a finite number" + _range_words(minimum, above, maximum) + _float32_words([value])
        raise ValueError(_message(config, field, value, expected))


def check_strength(config: object, field: str) -> None:
    """Requires a finite number other than 0, for the factor of all that a scheme adds.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field)
    value = getattr(config, field)
    if value == 0:
        message = _message(config, field, value, "a number other than 0")
        raise ValueError(f"{message} With 0 nothing is added, which is the scheme 'none'.")


def check_integer(
    config: object, field: str, *, minimum: int | None = None, maximum: int | None = None, optional: bool = False
) -> None:
    """Requires an `int` (not a `bool`) within `[minimum, maximum]`, of 64 bits at most.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if value is None and optional:
        return
    if isinstance(value, int) and value not in INTEGERS:
        raise ValueError(_message(config, field, value, "an integer of at most 64 bits"))
    if not isinstance(value, int) or not _is_number(value, minimum, None, maximum):
        raise ValueError(_message(config, field, value, "an integer" + _range_words(minimum, None, maximum)))


def check_base(config: object, field: str, *, optional: bool = False) -> None:
    """Requires a number greater than 0 whose powers make frequencies that float32 can hold at every position.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field, above=0, optional=optional)
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
        raise UnknownNameError(f"{type(config).__name__}.{field}", str(value), choices)


def check_numbers(config: object, field: str, *, minimum: float | None = None, above: float | None = None) -> None:
    """Requires a non-empty sequence of finite numbers, and stores it as a tuple.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if (
        not isinstance(value, tuple | list)
        or not value
        or not all(_is_number(item, minimum, above, None) for item in value)
    ):
        expected = "a non-empty sequence of finite numbers" + _range_words(minimum, above, None)
        if isinstance(value, tuple | list):
            expected += _float32_words(value)
        raise ValueError(_message(config, field, value, expected))
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


def _is_number(value: Any, minimum: float | None, above: float | None, maximum: float | None) -> bool:
    # The comparison is false for what is no number, and exact for integers that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        return False
    return (
        (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (maximum is None or value <= maximum)
    )


def _range_words(minimum: float | None, above: float | None, maximum: float | None) -> str:
    words = []
    if minimum is not None:
        words.append(f"at least {minimum}")
    if above is not None:
        words.append(f"greater than {above}")
    if maximum is not None:
        words.append(f"at most {maximum}")
    return " " + " and ".join(words) if words else ""


def _float32_words(values: Iterable[Any]) -> str:
    """Why numbers are refused that are finite, but not in float32."""
    if any(isinstance(value, int | float) and LARGEST_NUMBER < abs(value) < math.inf for value in values):
        return f", within the range of float32 (up to {LARGEST_NUMBER:.2g})"
    return ""


def _message(config: object, field: str, value: Any, expected: str) -> str:
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value not in INTEGERS:
        shown = f"an integer of {value.bit_length()} bits"
    else:
        shown = repr(value)
    return f"{type(config).__name__}.{field} is {shown}; expected {expected}."
