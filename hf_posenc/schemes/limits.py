"""Limits for the options of schemes and for the nesting of configs.

A config may come from an untrusted file. Without limits, a file of one kilobyte could exhaust the memory through an
option that is not tied to the size of a checkpoint's weights (the width of a formula, or the rows of a table in a model
that is built without weights). Numbers that fit float32 can also still overflow when a model multiplies with them.
Every limit is far above the values used by papers and released models.
"""

from __future__ import annotations

import reprlib
from typing import Any

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
