"""The options of configs: the checks of their values and types, and limits. Each error says what is expected.

A config may come from an untrusted file. Without limits, a file of one kilobyte could exhaust the memory through an
option that is not tied to the size of a checkpoint's weights (the width of a formula, or the rows of a table in a model
that is built without weights). Numbers that fit float32 can also still overflow when a model multiplies with them.
Every limit is far above the values used by papers and released models.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hf_posenc.errors import UnknownNameError

#: Positions, distances and lengths, in tokens.
LARGEST_LENGTH = 2**31 - 1
#: Rows of a table with one row per position, and the range of random positions.
MOST_ROWS = 2**20
#: Distinct distances of a bias that multiplies every query with a vector for each of them.
MOST_DISTANCES = 2**16
#: Units or components that are computed for every pair of tokens.
LARGEST_WIDTH = 2**12
#: Factors, strengths and standard deviations, and the inverse of divisors.
LARGEST_FACTOR = 1e6
SMALLEST_FACTOR = 1e-6
#: Numbers in an option that is a sequence.
MOST_NUMBERS = 2**16
#: Schemes combined in one layer.
MOST_PARTS = 64
#: Layers listed in a schedule.
MOST_LAYERS = 2**12
#: Nesting depth of schemes, including the innermost.
DEEPEST_NESTING = 16
#: Nesting depth of dictionaries and lists, and the total number of values, in the JSON form of a scheme. A list of
#: schemes needs two containers per level of nesting.
DEEPEST_JSON = 2 * DEEPEST_NESTING + 2
MOST_VALUES = 2**17

_REPR = reprlib.Repr()
_REPR.maxtuple = _REPR.maxlist = _REPR.maxdict = 8
_REPR.maxlevel = 4
_REPR.maxstring = _REPR.maxlong = 100
_REPR.maxother = 400


def shown(value: Any) -> str:
    """Returns the `repr` of a value for an error message, shortened to a readable length."""
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 63:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too long to print"


def rows_of_table(config: Any, max_positions: int | None) -> int:
    """The number of rows of a table with one row per position: the config's `num_positions`, or the model's own length.

    Args:
        config: with `num_positions`, which may be `None`.
        max_positions: the length that the model states, if it does.

    Raises:
        ValueError: if neither states a number, or the model states more than 2**20.
    """
    owner = type(config).__name__
    rows: int | None = max_positions if config.num_positions is None else config.num_positions
    if rows is None:
        raise ValueError(
            f"{owner}.num_positions is None and the model's config has no length. Give the number of rows, for example "
            "num_positions=2048."
        )
    if rows > MOST_ROWS:
        raise ValueError(
            f"{owner}.num_positions is None and the model's config has {rows} positions; a table has at most "
            f"{MOST_ROWS} rows. Give num_positions= for the length you need."
        )
    return rows


def check_shape_of_json(value: Any, owner: str, *, depth: int = DEEPEST_JSON, size: int = MOST_VALUES) -> None:
    """Checks that dictionaries and lists are nested at most `depth` deep and hold at most `size` values.

    Args:
        value: usually the return value of `json.loads`.
        owner: description of the value for the error message.
        depth: maximum nesting depth of containers.
        size: maximum number of values in total.

    Raises:
        ValueError: naming the limit.
    """
    count = 0
    level: list[Any] = [value]
    for _ in range(depth + 1):
        inside: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                inside.extend(container.values())
            elif isinstance(container, list | tuple):
                inside.extend(container)
            if count + len(inside) > size:
                raise ValueError(f"{owner} holds more than {size} values, which no scheme needs.")
        count += len(inside)
        level = inside
    if level:
        raise ValueError(
            f"{owner} has dictionaries and lists nested more than {depth} deep, which is the limit: no scheme needs it."
        )


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


#: With a smaller base, the product of a frequency and a 64-bit position can overflow float32.
SMALLEST_BASE = 1e-18
#: With a larger base, frequencies underflow to zero in float32.
LARGEST_BASE = 1e30
#: The frequency of the smallest base, in radians per position.
LARGEST_FREQUENCY = 1e18


def option(default: Any, check: Callable[..., None] | None = None, **limits: Any) -> Any:
    """A field of a config, or a parameter of a `distance_bias`, whose value is checked: `option(128, minimum=0)`.

    Args:
        default: of the field. A class is called for the default of each config.
        check: called with the config, the name of the field and the limits, unless the value is `None` and the field
            allows this. By default, the check for the declared type, as in `check_options`.
        **limits: arguments of the check. By default: `minimum` and `maximum` of a number, `above` (exclusive) of a
            `float`, `even` (the reason) of an `int`, `choices` of a `str`.
    """
    made = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return dataclasses.field(**made, metadata=checked(check, **limits))


def checked(check: Callable[..., None] | None = None, **limits: Any) -> dict[str, Any]:
    """The metadata of a field without a default, `dataclasses.field(metadata=checked(...))`; arguments as `option`."""
    return {"check": check, "limits": limits}


def check_options(config: object) -> None:
    """Checks the fields of a config that are declared with `option`, in their order.

    Raises:
        ValueError: naming the first field that has another type, or a value out of range.
    """
    config_class: Any = type(config)
    for name, optional, check in declared_checks(config_class):
        if not (optional and getattr(config, name) is None):
            check(config, name)


@functools.cache
def declared_checks(config_class: Any) -> list[tuple[str, bool, Callable[..., None]]]:
    """The fields to check, whether they may be `None`, and their checks.

    Raises:
        ValueError: for a field that is declared with limits that its check does not take.
    """
    declared: dict[str, dataclasses.Field[Any]] = {}
    for owner in reversed(config_class.__mro__):  # A subclass may change the default of a field.
        fields = vars(owner).get("__dataclass_fields__", {})
        declared |= {name: field for name, field in fields.items() if "check" in field.metadata}
    checks: list[tuple[str, bool, Callable[..., None]]] = []
    for name, field in declared.items():
        kind, *others = kind_of(field).split(" | ")
        check, limits = field.metadata["check"] or _CHECKS.get(kind), field.metadata["limits"]
        if check is None:
            known = f"which has no check. Use one of {', '.join(_CHECKS)}, or pass a check: option(default, check)."
            raise ValueError(f"The option {config_class.__name__}.{name} is declared as {kind!r}, {known}")
        try:
            inspect.signature(check).bind(None, name, **limits)
        except TypeError as error:
            known = ", ".join([*inspect.signature(check).parameters][2:]) or "none"
            wrong = f"The option {config_class.__name__}.{name} ({kind}) is declared with limits that it does not have"
            raise ValueError(f"{wrong}: {error}. Its limits are: {known}.") from None
        checks.append((name, "None" in others, functools.partial(check, **limits)))
    return checks


def check_number(
    config: object,
    field: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float = LARGEST_FACTOR,
) -> None:
    """Checks that a field is an `int` or `float` (not a `bool`) within `[minimum, maximum]` and greater than `above`.

    Without `minimum` and `above`, the value may be negative, down to `-maximum`. Integers that float64 cannot represent
    exactly are converted to floats, because tensors do not accept larger integers.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
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
    config: object, field: str, *, minimum: int | None = None, maximum: int = LARGEST_LENGTH, even: str = ""
) -> None:
    """Checks that a field is an `int` (not a `bool`) within `[minimum, maximum]`, and even if `even` says why.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if not isinstance(value, int) or not _is_number(value, minimum, None, maximum):
        raise ValueError(_message(config, field, value, "an integer" + _range_words(minimum, None, maximum)))
    if even and value % 2:
        raise ValueError(_message(config, field, value, f"an even number, because {even}"))


def check_base(config: object, field: str) -> None:
    """Checks that a field is a positive base whose frequencies are representable in float32 at every position.

    Raises:
        ValueError: for any other value.
    """
    check_number(config, field, above=0, maximum=LARGEST_BASE)
    value = getattr(config, field)
    if value < SMALLEST_BASE:
        expected = f"at least {SMALLEST_BASE}, so that positions times its frequencies are finite in float32"
        raise ValueError(_message(config, field, value, expected))


def check_boolean(config: object, field: str, *, optional: bool = False) -> None:
    """Checks that a field is `True` or `False`; the error adds `None` if it is `optional`.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if not isinstance(value, bool):
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


def check_numbers(
    config: object,
    field: str,
    *,
    minimum: float,
    maximum: float = LARGEST_FACTOR,
    least: int = 1,
    most: int = MOST_NUMBERS,
    kind: type = object,
) -> None:
    """Checks that a field is a sequence of numbers within `[minimum, maximum]`, and stores it as a tuple.

    Args:
        config: the config with the field.
        field: name of the field.
        minimum: the smallest allowed number.
        maximum: the largest allowed number.
        least: minimum count of numbers.
        most: maximum count of numbers.
        kind: `int` for integers only.

    Raises:
        ValueError: for any other value.
    """
    value = getattr(config, field)
    if (
        not isinstance(value, tuple | list)
        or not least <= len(value) <= most
        or not all(isinstance(item, kind) and _is_number(item, minimum, None, maximum) for item in value)
    ):
        count = str(most) if least == most else f"{least} to {most}"
        expected = f"a sequence of {count} {'integers' if kind is int else 'finite numbers'}, each"
        raise ValueError(_message(config, field, value, expected + _range_words(minimum, None, maximum)))
    object.__setattr__(config, field, tuple(value))


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


#: The checks by the first type that a field declares.
_CHECKS: dict[str, Callable[..., None]] = {
    "int": check_integer,
    "float": check_number,
    "bool": check_boolean,
    "str": check_choice,
    "tuple[int, ...]": functools.partial(check_numbers, kind=int, least=0, maximum=LARGEST_LENGTH),
    "tuple[float, ...]": check_numbers,
}
