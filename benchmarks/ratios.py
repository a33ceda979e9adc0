"""From the seconds of each round to ratios with a spread."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Ratio:
    """A subject over its baseline.

    Args:
        median: over rounds, of the ratios within one round.
        low: first quartile of these.
        high: third quartile of these.
        of_minima: the subject's fastest round over the baseline's.
    """

    median: float
    low: float
    high: float
    of_minima: float

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def ratio(subject: list[float], baseline: list[float]) -> Ratio:
    """The ratio of two series of the same rounds."""
    each = [mine / other for mine, other in zip(subject, baseline, strict=True)]
    low, median, high = quartiles(each)
    return Ratio(median, low, high, min(subject) / min(baseline))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
