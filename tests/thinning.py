"""Which cases of a matrix the default run takes; the others are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: the chosen ones run by default, the rest with `pytest -m slow`."""
    return [case if chosen(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]
