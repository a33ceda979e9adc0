"""Timing side by side: in every round, each subject runs once, in a new random order."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.machine import peak_bytes, reset_peak, resident_bytes, synchronize, within_free_memory
from benchmarks.subjects import BARE, STOCK, Call, Subject
from hf_posenc import PositionEncodingError

#: With fewer rounds, there would be no meaningful spread.
MIN_ROUNDS = 3
#: One measurement is the mean of at most this many calls.
_MAX_CALLS = 30
#: If a call takes longer than this many seconds, the earlier content of the processor's caches does not matter.
_SLOW = 0.5


@dataclass(frozen=True)
class Pace:
    """How long to measure: at most `rounds`, and after `cell_seconds` at most three. A subject whose three rounds would
    take longer than `subject_seconds` is left out, except for a baseline. One measurement is the mean of as many calls
    as fit into `measurement_seconds`.
    """

    rounds: int = 10
    cell_seconds: float = 240.0
    subject_seconds: float = 90.0
    seed: int = 0
    measurement_seconds: float = 0.1

    def too_slow(self, seconds: float) -> str | None:
        """Returns why a subject with this number of seconds per round is left out; `None` if it is not."""
        total = seconds * MIN_ROUNDS
        if total <= self.subject_seconds:
            return None
        return (
            f"too slow: {MIN_ROUNDS} rounds would take about {total:.0f} s, and --subject_seconds "
            f"allows {self.subject_seconds:g}"
        )

    def calls(self, seconds: float) -> int:
        """Returns the number of calls in one measurement, if a call takes this number of seconds."""
        return max(1, min(_MAX_CALLS, math.ceil(self.measurement_seconds / seconds)))


def time_subjects(
    subjects: Sequence[Subject], phase: str, length: int, pace: Pace, device: str, deadline: float = math.inf
) -> dict[str, Any]:
    """Times all subjects against each other.

    Returns:
        `rounds`, their number; `rows`, see `row_of`; `left_out`, the reasons by subject; and `lasting`, those of them
        whose reason also applies to longer inputs. On a GPU, a row has `peak_bytes` above the memory held before.
    """
    left_out: dict[str, str] = {}
    lasting: set[str] = set()
    quick: dict[str, float] = {}
    peaks: dict[str, dict[str, int]] = {}
    baselines = {subject.baseline for subject in subjects}

    def attempt(subject: Subject, measure: Callable[[Call], float]) -> float | None:
        """Returns the seconds of one call. If it fails for any reason, the subject is left out."""
        try:
            with subject.ready(phase, length) as call:
                return measure(call)
        except Exception as error:
            if subject.family == BARE and subject.name in baselines:
                raise BenchmarkError(
                    f"{subject.name!r}, which the schemes are measured against, failed: {type(error).__name__}: {error}"
                ) from error
            left_out[subject.name], lasts = reason_of(error)
            lasting.update([subject.name] if lasts else [])
            return None

    def drop_those_without_baseline() -> None:
        for subject in subjects:
            if subject.baseline in left_out and subject.name not in left_out:
                left_out[subject.name] = f"its baseline, {subject.baseline!r}, could not be run"

    def first(call: Call) -> float:
        seconds = timed(call, device)
        # The first call may include compilation.
        compiles = device == "cuda" or call.seconds is not None
        return timed(call, device) if seconds < _SLOW or compiles else seconds

    with within_free_memory(device), contextlib.ExitStack() as stack:
        for subject in subjects:
            before = resident_bytes(device)
            reset_peak(device)
            seconds = attempt(subject, first)
            if seconds is None:
                continue
            quick[subject.name] = seconds
            peaks[subject.name] = {"peak_bytes": peak_bytes(device) - before} if device == "cuda" else {}
            reason = None if subject.name in baselines else pace.too_slow(seconds)
            if reason is not None:
                left_out[subject.name] = reason
                lasting.add(subject.name)
        drop_those_without_baseline()
        running = [subject for subject in subjects if subject.name not in left_out]
        calls = {subject.name: pace.calls(quick[subject.name]) for subject in running}
        times: dict[str, list[float]] = {subject.name: [] for subject in running}
        order = random.Random(f"{pace.seed} {phase} {length}")
        end = min(time.monotonic() + pace.cell_seconds, deadline)
        rounds = 0
        # Garbage is collected before a round, not during it.
        stack.callback(gc.enable)
        gc.disable()
        while rounds < pace.rounds and (rounds < MIN_ROUNDS or time.monotonic() < end):
            gc.collect()
            order.shuffle(running)
            for subject in list(running):
                warm = quick[subject.name] < _SLOW
                seconds = attempt(subject, partial(_mean, calls=calls[subject.name], warm=warm, device=device))
                if seconds is None:
                    running.remove(subject)
                else:
                    times[subject.name].append(seconds)
            rounds += 1
    drop_those_without_baseline()
    times = {name: seconds for name, seconds in times.items() if name not in left_out}
    rows = [
        row_of(subject, times) | {"calls": calls[subject.name]} | peaks[subject.name]
        for subject in subjects
        if subject.name in times
    ]
    return {"rounds": rounds, "rows": rows, "left_out": left_out, "lasting": sorted(lasting)}


def row_of(subject: Subject, times: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the milliseconds of every round, and quartiles of the ratios to other subjects within rounds."""
    measured = times[subject.name]
    row: dict[str, Any] = {"subject": subject.name, "family": subject.family, "baseline": subject.baseline}
    row["milliseconds"] = round(statistics.median(measured) * 1e3, 4)
    for name, other in (("ratio", subject.baseline), ("to_bare", BARE), ("to_stock", STOCK)):
        if other in times:
            ratios = quartiles(measured, times[other]) | {"of_minima": min(measured) / min(times[other])}
            row[name] = {key: round(value, 4) for key, value in ratios.items()}
    return row | {"rounds": [round(seconds * 1e3, 4) for seconds in measured]}


def quartiles(times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Returns the `median` of the ratios of two subjects within a round, and their quartiles `low` and `high`."""
    ratios = [mine / theirs for mine, theirs in zip(times, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return {"median": median, "low": low, "high": high}


def spread(quartiles: dict[str, float]) -> str:
    """Formats a median with its quartiles, as in "1.073 (1.063-1.097)"."""
    return f"{quartiles['median']:.3f} ({quartiles['low']:.3f}-{quartiles['high']:.3f})"


def reason_of(error: Exception) -> tuple[str, bool]:
    """Returns why a subject cannot run, and whether that also applies to longer inputs."""
    if isinstance(error, BenchmarkError):
        return str(error), False
    lines = str(error).strip().splitlines() or [""]
    memory = any("can't allocate memory" in line or "out of memory" in line for line in lines)
    if isinstance(error, PositionEncodingError):
        why = "refused"
    else:
        why = "does not fit into free memory" if memory else f"failed with {type(error).__name__}"
    return f"{why}: {lines[0][:300]}", memory


def _mean(call: Call, calls: int, warm: bool, device: str) -> float:
    """Returns the mean seconds of some calls."""
    if warm:
        call.once()
    return sum(timed(call, device) for _ in range(calls)) / calls


def timed(call: Call, device: str) -> float:
    """Returns the seconds of one call."""
    if call.seconds is not None:
        return call.seconds()
    synchronize(device)
    start = time.perf_counter()
    call.run()
    synchronize(device)
    seconds = time.perf_counter() - start
    call.after()
    return seconds
