"""Times of several subjects, measured in turn, and their ratios within a round."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

#: What is timed: a prompt that is read, and tokens that are written after it. Milliseconds per token.
PHASES = ("reading", "writing")

Times = dict[str, dict[str, list[float]]]


def measure(run: Callable[[str], Mapping[str, float]], names: Sequence[str], rounds: int) -> Times:
    """Runs every subject once in each round, in random order.

    Args:
        run: runs a subject and returns its time by phase.
        names: of the subjects. The first runs twice in each round, as `again(names[0])` too.
        rounds: number of rounds.

    Returns:
        The times by name and phase.
    """
    generator, subjects = random.Random(0), [*names, again(names[0])]
    times: Times = {name: {phase: [] for phase in PHASES} for name in subjects}
    for _ in range(rounds):
        for name in generator.sample(subjects, len(subjects)):
            by_phase = run(names[0] if name == subjects[-1] else name)
            for phase in PHASES:
                times[name][phase].append(by_phase[phase])
    return times


def again(name: str) -> str:
    """The name of the second run of a subject, whose ratio to the first is the noise of the machine."""
    return f"{name} again"


def ratios(times: Sequence[float], first: Sequence[float]) -> tuple[float, float, float]:
    """The median of the ratios within a round, and their quartiles: `(median, low, high)`."""
    quotients = [mine / its for mine, its in zip(times, first, strict=True)]
    if len(quotients) < 2:
        return quotients[0], quotients[0], quotients[0]
    low, middle, high = statistics.quantiles(quotients, n=4, method="inclusive")
    return middle, low, high


def spread(middle: float, low: float, high: float) -> str:
    """A ratio with its quartiles, as in "1.07 (1.06 to 1.10)"."""
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
