"""Which cases of a matrix the default run takes; the others are marked slow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: the chosen ones run by default, the rest with `pytest -m slow`.

    Args:
        cases: values of one name, or tuples of the values of several.
        chosen: says which run by default.
    """
    return [case if chosen(case) else _slow(case) for case in cases]


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the values of several names. By default each value of the first name takes one of the others.

    The values of the second name go round with those of the first one, and those of a later name change whenever the
    names between have gone round. So every value occurs in the default run, if the first name has enough of them.
    """
    values = [list(axis) for axis in axes]
    first, *others = map(len, values)
    chosen = {
        (row, *(row // math.prod(others[:index]) % length for index, length in enumerate(others)))
        for row in range(first)
    }
    assert all(len({cell[axis] for cell in chosen}) == len(values[axis]) for axis in range(len(values)))
    cells = list(itertools.product(*(range(len(axis)) for axis in values)))
    cases = [tuple(axis[index] for axis, index in zip(values, cell, strict=True)) for cell in cells]
    return [case if cell in chosen else _slow(case) for case, cell in zip(cases, cells, strict=True)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
