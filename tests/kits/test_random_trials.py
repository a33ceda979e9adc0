"""Some of the random trials, and that they see a difference."""

from __future__ import annotations

from typing import Any

import pytest

from . import random_trials
from .random_trials import trial

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(20, 1000, 20))])
def test_every_way_computes_the_same(first: int) -> None:
    trials = [trial(number) for number in range(first, first + 20)]
    assert not [(what, found) for what, found in trials if found]
    assert sum(what.partition(":")[0].isdigit() for what, _ in trials) >= 5


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = random_trials.decoded

    def wrong(model: Any, *args: Any, **given: Any) -> Any:
        return steps(model, *args, **given) + (0.1 if hasattr(model, "position_encoding") else 0.0)

    monkeypatch.setattr(random_trials, "decoded", wrong)
    found = [set(found) for _, found in map(trial, range(20))]
    assert {"decoded", "gaps"} <= set.union(*found)
    assert not {"saved", "copied", "one row"} & set.union(*found)
