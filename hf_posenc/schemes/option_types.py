"""Conversion of option values to the types that a config declares. JSON and the shell do not distinguish 1 from 1.0."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hf_posenc.schemes.limits import shown

_PLAIN: dict[str, tuple[type, str]] = {
    "int": (int, "an integer"),
    "float": (float, "a finite number"),
    "bool": (bool, "True or False"),
    "None": (type(None), "None"),
}
#: float64 represents all integers up to this one exactly.
EXACT_INTEGERS = 2**53


def kind_of(field: dataclasses.Field[Any]) -> str:
    """Returns the annotation of a field as a string."""
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def is_text(field: dataclasses.Field[Any]) -> bool:
    """Whether a field accepts only strings."""
    return kind_of(field) == "str"


def as_declared(value: Any, field: dataclasses.Field[Any]) -> Any:
    """Converts integers from JSON or the shell to floats if the field declares only floats, also in sequences.

    Args:
        value: of the option.
        field: of the config.
    """
    kinds = kind_of(field).split(" | ")
    if isinstance(value, tuple | list) and any(kind.startswith("tuple[float") for kind in kinds):
        return type(value)(_as_float(item) for item in value)
    return _as_float(value) if "float" in kinds and "int" not in kinds else value


def check_declared(value: Any, field: dataclasses.Field[Any], owner: str) -> None:
    """Raises an error if a field declares a number or a boolean and the value is neither.

    The configs of this package have stricter checks with more specific messages. Third-party configs may have none.

    Args:
        value: of the option.
        field: of the config.
        owner: name of the config class, for the error message.

    Raises:
        ValueError: for a value of another type, such as 1.0 for an integer or 1 for a boolean, and for NaN or infinity.
    """
    kinds = kind_of(field).split(" | ")
    if not set(kinds) <= set(_PLAIN):
        return
    types = tuple(_PLAIN[kind][0] for kind in kinds)
    # In Python a bool is an int. An integer that a float cannot represent is not converted.
    fits = bool in types if isinstance(value, bool) else isinstance(value, (*types, int) if float in types else types)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        expected = " or ".join(_PLAIN[kind][1] for kind in kinds)
        raise ValueError(f"{owner}.{field.name} is {shown(value)}; expected {expected}.")


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int and abs(value) <= EXACT_INTEGERS else value
