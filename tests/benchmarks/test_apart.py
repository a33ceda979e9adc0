"""Calls that are timed in a separate process."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import active_children

import pytest

from benchmarks.apart import Apart
from benchmarks.errors import BenchmarkError


def failing_at(call: int) -> Callable[[], tuple[Callable[[], None], Callable[[], None]]]:
    """A call that fails once, or cannot be prepared (0)."""

    def prepare() -> tuple[Callable[[], None], Callable[[], None]]:
        if call == 0:
            raise ValueError("not prepared")
        calls = iter(range(1, 10))

        def run() -> None:
            if next(calls) == call:
                raise ValueError("not run")

        return run, lambda: None

    return prepare


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_failure_is_an_answer(call: int) -> None:
    """If it was kept for the next request, both processes would wait for each other."""
    apart = Apart(failing_at(call))
    try:
        for number in range(1, 4):
            if call in (0, number):
                with pytest.raises(BenchmarkError, match="ValueError: not"):
                    apart.seconds()
            else:
                assert apart.seconds() >= 0
    finally:
        apart.close()
    assert not [child for child in active_children() if child.pid == apart._process.pid]
