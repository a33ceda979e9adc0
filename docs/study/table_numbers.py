"""What the tables of docs/study share: which training runs they are about, and how numbers are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from docs.study.claims import LENGTH, Measure, Run, Runs, tail_loss
from docs.study.significance import Interval, mean_difference, share

LENGTHS = (LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH)
#: Labels that start from a trained RoPE.
SCALINGS = ("pi", "ntk", "yarn", "self_extend", "rerope")
NOT_RUN = "*Not run yet.*"
#: Examples of a task per length and seed.
_SAMPLES = 100


def filled(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page with its tables made anew, which stand between `<!-- table: NAME -->` and `<!-- end -->`."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{tables[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


def finished(runs: Runs, study: str, task: str = "causal") -> dict[str, dict[int, Run]]:
    """The finished training runs of a task, by scheme and seed."""
    trained: dict[str, dict[int, Run]] = {}
    for run in runs.get(study, ()):
        if run["task"] == task and run["status"] == "finished":
            trained.setdefault(run["scheme"], {})[run["seed"]] = run
    return trained


def processors(seeds: Mapping[int, Run]) -> set[str | None]:
    """The processors that some training runs ran on."""
    return {run.get("processor") for run in seeds.values()}


def seeds_of(runs: Runs, study: str, scheme: str, task: str = "causal") -> str:
    """The number of training runs in a row, such as "5", or "4 of 5" if one diverged or could not be made."""
    statuses = [run["status"] for run in runs.get(study, ()) if (run["task"], run["scheme"]) == (task, scheme)]
    ended = statuses.count("finished")
    return str(ended) if ended == len(statuses) else f"{ended} of {len(statuses)}"


def mean_of(values: Iterable[float]) -> Interval:
    """The mean over seeds with Student's interval. One seed has no interval, and none has no mean: they are NaN."""
    numbers = list(values)
    if len(numbers) > 1:
        return mean_difference(numbers)
    return Interval(numbers[0] if numbers else math.nan, math.nan, math.nan)


def mean_paired(first: Mapping[int, float], second: Mapping[int, float]) -> Interval:
    """The mean of `first - second` over the seeds that both have. Without one it is NaN."""
    return mean_of(first[seed] - second[seed] for seed in sorted(first.keys() & second.keys()))


def shown(interval: Interval, digits: int = 3) -> str:
    """A mean, ± half of its interval where it has one; empty without a mean."""
    if math.isnan(interval.value):
        return ""
    half = (interval.high - interval.low) / 2
    return f"{interval.value:,.{digits}f}" + (f" ± {half:,.{digits}f}" if half > 0 else "")


def ranged(interval: Interval, digits: int = 3) -> str:
    """A difference, with the ends of its interval where it has one; empty without a difference."""
    if math.isnan(interval.value):
        return ""
    ends = "" if math.isnan(interval.low) else f" [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"
    return f"{interval.value:+.{digits}f}{ends}"


def tail(seeds: Mapping[int, Run], length: int) -> Interval:
    """The loss of the same last tokens with this much context."""
    return mean_of(tail_by_seed(seeds, length).values())


def tail_by_seed(seeds: Mapping[int, Run], length: int) -> dict[int, float]:
    """The loss of the same last tokens by seed."""
    return {seed: tail_loss(run, length) for seed, run in seeds.items()}


def never_reached(runs: Runs, measure: Measure) -> bool:
    """Whether a training did not reach the loss to which steps are counted, so that its number is a lower bound."""
    trained = finished(runs, measure.study, measure.task).get(measure.scheme, {})
    return any(min(run["curve"]["validation_loss"]) >= measure.at for run in trained.values())


def share_of_answers(seeds: Iterable[Run], length: int) -> str:
    """The share of right answers at a length, with its interval."""
    readings = [run["exact_match"] for run in seeds]
    right = [round(_SAMPLES * reading["accuracy"][reading["lengths"].index(length)]) for reading in readings]
    interval = share(right, [_SAMPLES] * len(right))
    return f"{interval.value:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are text and whose others are numbers; `NOT_RUN` without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * texts + "---:|" * (len(head) - texts))
    return "\n".join(lines) if len(lines) > 2 else NOT_RUN


def ranked(head: Sequence[str], rows: Iterable[tuple[float, Sequence[str]]]) -> str:
    """A table whose rows are sorted by a number that stands before each of them, the lowest first."""
    return markdown(head, [cells for _, cells in sorted(rows)])
