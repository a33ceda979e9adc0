from __future__ import annotations

import gc
import time

import pytest
import torch

from benchmarks.errors import BenchmarkError
from benchmarks.machine import within_free_memory
from benchmarks.timing import MIN_ROUNDS, Pace, row_of, time_subjects
from hf_posenc import UnsupportedError
from tests.benchmarks.tiny import Sleeper

#: A measurement is one call or two, since no figure of a test is looked at closely.
_SHORT = 0.004
_PACE = Pace(rounds=4, cell_seconds=5.0, subject_seconds=20.0, measurement_seconds=_SHORT)


def test_a_slow_subject_has_a_ratio_well_above_one():
    subjects = [Sleeper("bare", 0.004, family="bare"), Sleeper("same", 0.004), Sleeper("slow", 0.2)]
    timings = time_subjects(subjects, "forward", 16, _PACE, "cpu")
    assert gc.isenabled()
    rows = {row["subject"]: row for row in timings["rows"]}
    assert rows["bare"]["to_bare"]["median"] == 1.0
    # Sleeping takes at least as long as asked, and on a busy machine some milliseconds longer.
    assert rows["slow"]["to_bare"]["median"] > 1.5
    assert rows["slow"]["to_bare"]["median"] > rows["same"]["to_bare"]["median"]
    assert rows["slow"]["to_bare"]["low"] <= rows["slow"]["to_bare"]["median"] <= rows["slow"]["to_bare"]["high"]
    assert all(len(row["rounds"]) == timings["rounds"] for row in rows.values())


def test_no_round_is_added_after_the_time_but_three_are_run():
    subjects = [Sleeper("bare", 0.05, family="bare")]
    timings = time_subjects(
        subjects, "forward", 16, Pace(rounds=9, cell_seconds=0.01, measurement_seconds=_SHORT), "cpu"
    )
    assert timings["rounds"] == MIN_ROUNDS
    timings = time_subjects(
        subjects, "forward", 16, Pace(rounds=9, measurement_seconds=_SHORT), "cpu", deadline=time.monotonic() - 1
    )
    assert timings["rounds"] == MIN_ROUNDS


def test_subjects_that_fail_are_left_out_with_the_reason():
    memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    subjects = [
        Sleeper("bare", 0.001, family="bare"),
        Sleeper("broken", 0.001, error=ZeroDivisionError("by zero")),
        Sleeper("large", 0.001, error=memory),
        Sleeper("refused", 0.001, error=UnsupportedError("no cache")),
        Sleeper("slow", 0.2),
        Sleeper("own", 0.001, baseline="broken"),
    ]
    timings = time_subjects(
        subjects, "forward", 16, Pace(rounds=3, subject_seconds=0.5, measurement_seconds=_SHORT), "cpu"
    )
    assert [row["subject"] for row in timings["rows"]] == ["bare"]
    assert timings["left_out"]["broken"] == "failed with ZeroDivisionError: by zero"
    assert timings["left_out"]["large"].startswith("does not fit into free memory: ")
    assert timings["left_out"]["refused"] == "refused: no cache"
    assert timings["left_out"]["slow"].startswith("too slow: 3 rounds would take about")
    assert "'broken', could not be run" in timings["left_out"]["own"]
    assert timings["lasting"] == ["large", "slow"]


def test_a_bare_model_that_fails_is_an_error():
    with pytest.raises(BenchmarkError, match="'bare', which the schemes are measured against, failed: ValueError: no"):
        time_subjects([Sleeper("bare", 0.0, family="bare", error=ValueError("no"))], "train", 16, _PACE, "cpu")


def test_order_is_drawn_and_repeatable():
    def order(seed: int) -> list[str]:
        told: list[str] = []
        subjects = [Sleeper(name, 0.005) for name in ("bare", "one", "two", "three")]
        for subject in subjects:
            subject.calls = _Told(told, subject.name)  # type: ignore[assignment]
        time_subjects(subjects, "forward", 16, Pace(rounds=3, seed=seed, measurement_seconds=_SHORT), "cpu")
        return told

    assert order(0) == order(0)
    assert order(0) != order(1)


class _Told:
    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def append(self, call: object) -> None:
        self.told.append(self.name)


def test_ratios_are_taken_within_rounds():
    times = {"alibi": [2.0, 40.0, 3.0], "bare": [1.0, 20.0, 2.0]}
    ratio = row_of(Sleeper("alibi", 0.0), times)["to_bare"]
    assert ratio["median"] == ratio["of_minima"] == 2.0
    assert ratio["low"] == 1.75


@pytest.mark.parametrize(("seconds", "calls"), [(10.0, 1), (0.002, 2), (1e-6, 30)])
def test_short_calls_are_repeated(seconds, calls):
    assert _PACE.calls(seconds) == calls


def test_an_allocation_beyond_the_machine_is_an_error_and_not_the_end_of_the_process():
    with within_free_memory("cpu"), pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(1 << 50, dtype=torch.uint8)
