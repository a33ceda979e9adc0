"""Values of options as the types that a config declares: JSON and the shell do not tell 1 from 1.0."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_posenc.schemes.limits import shown

_PLAIN: dict[str, tuple[type, str]] = {
    "int": (int, "an integer"),
    "float": (float, "a finite number"),
    "bool": (bool, "True or False"),
    "None": (type(None), "None"),
}
#: The largest integer below which float64 holds all of them.
EXACT_INTEGERS = 2**53


def kind_of(field: dataclasses.Field[Any]) -> str:
    """The annotation of a field as it is written."""
    kind = field.type
    return kind.__name__ if type(kind) is type else str(kind)


def is_text(field: dataclasses.Field[Any]) -> bool:
    """Whether a field takes nothing but text."""
    return kind_of(field) == "str"


def as_declared(value: Any, field: dataclasses.Field[Any]) -> Any:
    """A value read from JSON or the shell, with floats for integers where only floats are declared, in sequences too.

    Args:
        value: of the option.
        field: of the config.
    """
    kinds = kind_of(field).split(" | ")
    if isinstance(value, tuple | list) and any(kind.startswith("tuple[float") for kind in kinds):
        return type(value)(_as_float(item) for item in value)
    return _as_float(value) if "float" in kinds and "int" not in kinds else value


def check_declared(value: Any, field: dataclasses.Field[Any], owner: str) -> None:
    """Refuses a value that is no number or truth value where one is declared.

    The configs of this package refuse more than that, in better words; those of others may check nothing.

    Args:
        value: of the option.
        field: of the config.
        owner: name of the config class, for the error.

    Raises:
        ValueError: for a value of another type: 1.0 where an integer is declared, 1 where a truth value is.
    """
    kinds = kind_of(field).split(" | ")
    if not set(kinds) <= set(_PLAIN):
        return
    types = tuple(_PLAIN[kind][0] for kind in kinds)
    # A bool is an int to Python, and an integer that no float holds stays one.
    fits = bool in types if isinstance(value, bool) else isinstance(value, (*types, int) if float in types else types)
    if not fits:
        expected = " or ".join(_PLAIN[kind][1] for kind in kinds)
        raise ValueError(f"{owner}.{field.name} is {shown(value)}; expected {expected}.")


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int and abs(value) <= EXACT_INTEGERS else value
