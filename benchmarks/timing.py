"""Timing side by side: in every round each subject runs once, in an order that is drawn anew."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.errors import BenchmarkError
from benchmarks.machine import peak_bytes, reset_peak, resident_bytes, synchronize, within_free_memory
from benchmarks.subjects import Call, Subject
from hf_posenc import PositionEncodingError

#: Fewer would have no spread to speak of.
MIN_ROUNDS = 3
#: One measurement is the mean of no more calls than this.
_MAX_CALLS = 30
#: A subject that is slower than this per call does not care what was in the processor's caches before it.
_SLOW = 0.5


@dataclass(frozen=True)
class Pace:
    """How long is measured.

    Args:
        rounds: at most.
        cell_seconds: after so long no more rounds are added, once there are three.
        subject_seconds: a subject whose three rounds would take longer is left out; a baseline never is.
        seed: of the order.
        measurement_seconds: one measurement is the mean of as many calls as fit into this time.
    """

    rounds: int = 10
    cell_seconds: float = 240.0
    subject_seconds: float = 90.0
    seed: int = 0
    measurement_seconds: float = 0.1

    def too_slow(self, seconds: float) -> str | None:
        """Why a subject is left out that takes so many seconds per round; `None` if it is not."""
        total = seconds * MIN_ROUNDS
        if total <= self.subject_seconds:
            return None
        return (
            f"too slow: {MIN_ROUNDS} rounds would take about {total:.0f} s, and --subject_seconds "
            f"allows {self.subject_seconds:g}"
        )


@dataclass
class Timings:
    """What was measured of one cell.

    Args:
        rounds: how many.
        calls: how many calls each measurement is the mean of, by subject.
        seconds: of one call, in every round, by subject.
        left_out: reasons, by subject.
        lasting: those of them that hold for longer inputs too.
        peaks: on a GPU, by how many bytes the peak of a call and of what it needs exceeds what was held before.
    """

    rounds: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    lasting: set[str] = field(default_factory=set)
    peaks: dict[str, int] = field(default_factory=dict)


def time_subjects(
    subjects: Sequence[Subject],
    phase: str,
    length: int,
    pace: Pace,
    device: str,
    deadline: float = math.inf,
    report: Callable[[str], None] = lambda line: None,
) -> Timings:
    """Times all subjects against each other.

    Args:
        subjects: with their baselines among them.
        phase: one of `PHASES`.
        length: tokens.
        pace: how long.
        device: that is waited for.
        deadline: of `time.monotonic()`; no more rounds are added after it, once there are three.
        report: is told how far it is.

    Raises:
        BenchmarkError: if a baseline that others are measured against fails.
    """
    timings = Timings()
    baselines = {subject.baseline for subject in subjects}
    with within_free_memory(device):
        quick = _warm_up(subjects, baselines, phase, length, device, timings)
        for name, seconds in quick.items():
            reason = None if name in baselines else pace.too_slow(seconds)
            if reason is not None:
                timings.left_out[name] = reason
                timings.lasting.add(name)
        running = [subject for subject in subjects if subject.name not in timings.left_out]
        timings.seconds = {subject.name: [] for subject in running}
        timings.calls = {subject.name: calls_for(quick[subject.name], pace.measurement_seconds) for subject in running}
        order = random.Random(f"{pace.seed} {phase} {length}")
        end = min(time.monotonic() + pace.cell_seconds, deadline)
        while timings.rounds < pace.rounds and (timings.rounds < MIN_ROUNDS or time.monotonic() < end):
            order.shuffle(running)
            with _without_collector():
                for subject in list(running):
                    name = subject.name
                    try:
                        seconds = _measure(subject, phase, length, timings.calls[name], quick[name] < _SLOW, device)
                    # Whatever the reason, it is told in the results; only this subject is left out.
                    except Exception as error:
                        _leave_out(subject, error, baselines, timings)
                        running.remove(subject)
                    else:
                        timings.seconds[name].append(seconds)
            timings.rounds += 1
            report(f"round {timings.rounds}")
    _drop_those_without_baseline(subjects, timings)
    return timings


def calls_for(seconds: float, measurement_seconds: float) -> int:
    """How many calls of so many seconds make one measurement."""
    return max(1, min(_MAX_CALLS, math.ceil(measurement_seconds / seconds)))


def _warm_up(
    subjects: Sequence[Subject], baselines: set[str], phase: str, length: int, device: str, timings: Timings
) -> dict[str, float]:
    """Seconds of one call of each subject that can be run, everything lazy behind it; the others are left out."""
    quick: dict[str, float] = {}
    for subject in subjects:
        before = resident_bytes(device)
        reset_peak(device)
        try:
            with subject.ready(phase, length) as call:
                seconds = _timed(call, device)
                # On a GPU the first call may have compiled its kernels.
                if seconds < _SLOW or device == "cuda":
                    seconds = _timed(call, device)
        # As above.
        except Exception as error:
            _leave_out(subject, error, baselines, timings)
        else:
            quick[subject.name] = seconds
            if device == "cuda":
                timings.peaks[subject.name] = peak_bytes(device) - before
    _drop_those_without_baseline(subjects, timings)
    return quick


def _drop_those_without_baseline(subjects: Sequence[Subject], timings: Timings) -> None:
    for subject in subjects:
        if subject.baseline in timings.left_out and subject.name not in timings.left_out:
            timings.left_out[subject.name] = f"what it is measured against, {subject.baseline!r}, could not be run"
            timings.seconds.pop(subject.name, None)


def _leave_out(subject: Subject, error: Exception, baselines: set[str], timings: Timings) -> None:
    if subject.family == "bare" and subject.name in baselines:
        raise BenchmarkError(
            f"{subject.name!r}, which the schemes are measured against, failed: {type(error).__name__}: {error}"
        ) from error
    lines = str(error).strip().splitlines() or [""]
    memory = any("can't allocate memory" in line or "out of memory" in line for line in lines)
    if isinstance(error, PositionEncodingError):
        why = "refused"
    else:
        why = "does not fit into the memory that is free" if memory else f"failed with {type(error).__name__}"
    timings.left_out[subject.name] = f"{why}: {lines[0][:300]}"
    if memory:
        timings.lasting.add(subject.name)
    timings.seconds.pop(subject.name, None)


def _measure(subject: Subject, phase: str, length: int, calls: int, warm: bool, device: str) -> float:
    """The mean seconds of some calls."""
    with subject.ready(phase, length) as call:
        if warm:
            call.once()
        return sum(_timed(call, device) for _ in range(calls)) / calls


def _timed(call: Call, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    call.run()
    synchronize(device)
    seconds = time.perf_counter() - start
    call.after()
    return seconds


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Garbage is collected before a round and not within it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
