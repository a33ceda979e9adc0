"""Checks shared by the config constructors: each error names the field, the value found, and what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnknownNameError


def check_number(
    config: object,
    field: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
) -> None:
    """Requires a finite `int` or `float` (not a `bool`) within `[minimum, maximum]` and greater than `above`.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if value is None and optional:
        return
    if not _is_number(value, minimum, above, maximum):
        raise ValueError(_message(config, field, value, "a finite number" + _range_words(minimum, above, maximum)))


def check_integer(
    config: object, field: str, *, minimum: int | None = None, maximum: int | None = None, optional: bool = False
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
        ValueError: for real numbers, which a position map may have made of them.
    """
    if ids.is_floating_point():
        raise ValueError(
            f"The scheme {scheme!r} needs whole positions, but a position map made real numbers of them. Use a map "
            "that keeps them whole (a whole factor, kind='integer'), or a scheme of real positions such as 'rope', "
            "'alibi' or 'sinusoidal'."
        )
    return ids


def _is_number(value: Any, minimum: float | None, above: float | None, maximum: float | None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
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


def _message(config: object, field: str, value: Any, expected: str) -> str:
    return f"{type(config).__name__}.{field} is {value!r}; expected {expected}."
