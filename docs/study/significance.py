"""How sure differences between schemes are: over seeds, over seeds and texts together, and for shares of right answers.

Differences are paired: two schemes with the same seed have the same data order, and read the same texts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.errors import SettingsError

#: Two sides of 2.5 %.
_LEVEL = 0.95
#: Points on each axis of the posterior of a share.
_CENTRES = (np.arange(400) + 0.5) / 400


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval.

    Args:
        value: the estimate.
        low: the lower end.
        high: the upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> NDArray[np.float64]:
    """`first - second` for every seed that both have, `(seeds,)`.

    Raises:
        SettingsError: for fewer than two common seeds.
    """
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        raise SettingsError(
            f"A paired comparison needs at least two seeds that both schemes have, and these have {len(seeds)}."
        )
    return np.array([first[seed] - second[seed] for seed in seeds])


def mean_difference(differences: ArrayLike) -> Interval:
    """The mean of paired differences with Student's interval.

    Args:
        differences: `(seeds,)`, at least two.
    """
    values = np.asarray(differences, dtype=np.float64)
    if np.ptp(values) == 0:
        return Interval(float(values[0]), float(values[0]), float(values[0]))
    return _student(values.mean(), values.var(ddof=1) / len(values), len(values) - 1)


def prediction(values: ArrayLike) -> Interval:
    """The mean of trainings, with the 95 % interval in which one more training is expected.

    Args:
        values: `(seeds,)`, at least two, from a normal distribution.
    """
    known = np.asarray(values, dtype=np.float64)
    return _student(known.mean(), known.var(ddof=1) * (1 + 1 / len(known)), len(known) - 1)


def _student(mean: float, variance: float, freedom: float) -> Interval:
    """Student's interval around a mean with this variance of its own and these degrees of freedom."""
    from scipy import stats

    half = float(stats.t.ppf((1 + _LEVEL) / 2, freedom) * np.sqrt(variance))
    return Interval(float(mean), float(mean) - half, float(mean) + half)


def p_less(differences: ArrayLike) -> float:
    """The p-value of a one-sided paired t-test: that the mean difference is not below 0.

    Args:
        differences: `(seeds,)`, at least two. If all are the same, they have no variance for a t-test, and the result
            is that of a sign test.
    """
    from scipy import stats

    values = np.asarray(differences, dtype=np.float64)
    if np.ptp(values) == 0:
        return float(0.5 ** len(values)) if values[0] < 0 else 1.0
    return float(stats.ttest_1samp(values, 0.0, alternative="less").pvalue)


def p_equivalent(differences: ArrayLike, margin: float) -> float:
    """The p-value of two one-sided tests (TOST; Schuirmann 1987): that the mean difference is `margin` or more from 0.

    A small value shows equivalence. "Not significantly different" does not.

    Args:
        differences: `(seeds,)`, at least two.
        margin: the largest difference that counts as none.
    """
    values = np.asarray(differences, dtype=np.float64)
    return max(p_less(values - margin), p_less(-values - margin))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values of several tests, so that the chance of any false one is that of each (Holm 1979).

    Args:
        p_values: in any order.

    Returns:
        The adjusted values in the same order.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def difference_over_texts(first: ArrayLike, second: ArrayLike, *, neighbours: int = 1) -> Interval:
    """The mean difference, with an interval for other seeds and other texts of the kind.

    Seeds and texts are two random effects. The variance of the mean is at most that of the means of the seeds plus that
    of the means of the texts, each over its number; the sum counts what is left of a single pair twice. Student's
    quantile has the degrees of freedom of Satterthwaite (1946). A bootstrap that draws seeds and texts anew gives
    intervals that are too narrow for as few as five seeds.

    Args:
        first: `(seeds, texts)` losses, at least two of each.
        second: the same seeds and texts with another scheme.
        neighbours: how many neighbouring texts count as one, because they are from the same document.

    Raises:
        SettingsError: if the two have different shapes, or too few seeds or texts.
    """
    minuend, subtrahend = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if minuend.shape != subtrahend.shape or minuend.ndim != 2 or min(minuend.shape) < 2:
        raise SettingsError(
            f"The losses have the shapes {minuend.shape} and {subtrahend.shape}; expected (seeds, texts) twice, two "
            "of each or more."
        )
    differences = minuend - subtrahend
    blocks = np.array_split(differences, max(2, differences.shape[1] // neighbours), axis=1)
    of_seeds, of_texts = differences.mean(axis=1), np.array([block.mean() for block in blocks])
    parts = [values.var(ddof=1) / len(values) for values in (of_seeds, of_texts)]
    mean, variance = float(differences.mean()), sum(parts)
    if variance == 0:
        return Interval(mean, mean, mean)
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (of_seeds, of_texts), strict=True)
    )
    return _student(mean, variance, freedom)


def share(successes: Sequence[int], trials: Sequence[int]) -> Interval:
    """The share of right answers over training runs that differ, with a credible interval (beta-binomial model).

    Each training has its own share, drawn from a beta distribution with mean `m`, and the correlation `r` of two of its
    answers. The interval is that of `m`, with uniform priors of `m` and `r`. It is widened to the share itself where it
    does not contain that, stays between 0 and 1, and has a width where all shares are 0 or 1. It is about other
    trainings, and about other questions as far as every training has its own.

    Args:
        successes: right answers of each training.
        trials: questions of each training.
    """
    likelihood = np.zeros((len(_CENTRES), len(_CENTRES)))
    for right, count in zip(successes, trials, strict=True):
        likelihood += _log_likelihood(right, count)
    posterior = np.exp(likelihood - likelihood.max()).sum(axis=1)
    cumulative = np.cumsum(posterior) / posterior.sum()
    tail = (1 - _LEVEL) / 2
    low, high = (float(_CENTRES[np.searchsorted(cumulative, level)]) for level in (tail, 1 - tail))
    right_share = sum(successes) / sum(trials)
    return Interval(right_share, min(low, right_share), max(high, right_share))


@functools.cache
def _log_likelihood(successes: int, trials: int) -> NDArray[np.float64]:
    """`(means, correlations)`. Many training runs have the same number of right answers, such as none or all."""
    from scipy import stats

    mean, correlation = np.meshgrid(_CENTRES, _CENTRES, indexing="ij")
    strength = 1 / correlation - 1
    values: NDArray[np.float64] = stats.betabinom.logpmf(successes, trials, mean * strength, (1 - mean) * strength)
    return values
