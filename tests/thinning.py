"""Which cases of a matrix the default run takes; the others are marked slow."""

from __future__ import annotations

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


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
