"""How large the options of a scheme may be, and how deep configs may be nested.

A config may come from a file that somebody else wrote. An option whose cost no weight in a checkpoint bounds (the width
of a formula, the rows of a table in a model that is built without weights) would let a file of one kilobyte take all
memory, and a number that float32 can hold is not yet one that a model can be multiplied with. Every bound here is far
beyond what any paper or released model uses.
"""

from __future__ import annotations

import reprlib
from typing import Any

#: Positions, distances and lengths, in tokens.
LARGEST_LENGTH = 2**31 - 1
#: Rows of a table with one row per position, and positions that are drawn from.
MOST_ROWS = 2**20
#: Distances that a bias tells apart where every query is multiplied with all of them.
MOST_DISTANCES = 2**16
#: Units or components that every pair of tokens passes through.
LARGEST_WIDTH = 2**12
#: Factors, strengths and standard deviations, and the inverse of those that are divided by.
LARGEST_FACTOR = 1e6
SMALLEST_FACTOR = 1e-6
#: Numbers in an option that is a sequence.
MOST_NUMBERS = 2**16
#: Schemes that act together in one layer.
MOST_PARTS = 64
#: Layers that a schedule names.
MOST_LAYERS = 2**12
#: Schemes inside each other, counting the innermost.
DEEPEST_NESTING = 16
#: Dictionaries and lists inside each other, and values in all of them, in the JSON form of a scheme. A level of nesting
#: takes two containers where schemes are listed.
DEEPEST_JSON = 2 * DEEPEST_NESTING + 2
MOST_VALUES = 2**17

_REPR = reprlib.Repr()
_REPR.maxtuple = _REPR.maxlist = _REPR.maxdict = 8
_REPR.maxlevel = 4
_REPR.maxstring = _REPR.maxlong = 100
_REPR.maxother = 400


def shown(value: Any) -> str:
    """The `repr` of a value for an error message, cut to a readable length."""
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 63:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too long to print"


def check_shape_of_json(value: Any, owner: str, *, depth: int = DEEPEST_JSON, size: int = MOST_VALUES) -> None:
    """Requires that dictionaries and lists are nested no deeper than `depth` and hold at most `size` values.

    Args:
        value: what `json.loads` returned, or anything else.
        owner: what it is, for the error.
        depth: containers inside each other.
        size: values in all of them.

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
