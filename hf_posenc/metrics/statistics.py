"""Distances between tensors, rank correlation, confidence intervals of fractions, and evenly spread selections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: The 97.5 % quantile of the normal distribution, which leaves 2.5 % on each side.
_NORMAL_QUANTILE = 1.959963984540054
#: Curves that vary less than this count as flat, because rounding errors have ranks too.
_FLAT = 1e-4


def relative_l2(first: Tensor, second: Tensor) -> float:
    """Length of the difference, relative to the mean length of the two: 0 for equal tensors, at most 2.

    Args:
        first: a tensor of any shape, compared as one vector in float64.
        second: a tensor of the same shape.
    """
    return float(relative_changes(first.detach().reshape(1, -1), second.detach().reshape(1, -1)))


def cosine_distance(first: Tensor, second: Tensor) -> float:
    """One minus the cosine of the angle: 0 for equal directions, 2 for opposite ones.

    It is computed as half the squared distance of the unit vectors. Unlike `1 - cos`, this loses no digits if the two
    are close, and is exactly 0 if they are equal.

    Args:
        first: a tensor of any shape, compared as one vector in float64.
        second: a tensor of the same shape.
    """
    first, second = first.detach().double().flatten(), second.detach().double().flatten()
    lengths = first.norm(), second.norm()
    if lengths[0] == 0 or lengths[1] == 0:
        return 0.0 if lengths[0] == lengths[1] else 1.0
    return float((first / lengths[0] - second / lengths[1]).square().sum() / 2)


def relative_changes(first: Tensor, second: Tensor) -> Tensor:
    """`relative_l2` of each row of two `(batch, ...)` tensors, as `(batch,)` float64."""
    first, second = (values.double().flatten(start_dim=1) for values in (first, second))
    scale = (first.norm(dim=1) + second.norm(dim=1)) / 2
    return torch.where(scale == 0, 0.0, (first - second).norm(dim=1) / scale)


def spearman(first: Tensor, second: Tensor) -> float:
    """The rank correlation of two curves. Equal values share their mean rank. The result for a flat curve is 0."""
    if float(second.max() - second.min()) < _FLAT:
        return 0.0
    ranks = []
    for values in (first, second):
        _, inverse, counts = values.double().unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0).double() - (counts - 1) / 2)[inverse])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % confidence interval of a fraction (Wilson 1927, "Probable inference", J. Am. Stat. Assoc. 22).

    Unlike the normal interval, it stays between 0 and 1, and has a width even if all trials or none succeeded.
    """
    square = _NORMAL_QUANTILE**2
    fraction = successes / trials
    centre = (fraction + square / (2 * trials)) / (1 + square / trials)
    spread = math.sqrt(fraction * (1 - fraction) / trials + square / (4 * trials**2))
    half = _NORMAL_QUANTILE * spread / (1 + square / trials)
    # The ends at 0 and 1 are exact and must not be changed by rounding.
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


def spread(values: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` of the values, evenly spread from the first to the last; only the last if `most` is 1."""
    if len(values) <= most or most == 1:
        return list(values[-most:])
    return [values[round(step * (len(values) - 1) / (most - 1))] for step in range(most)]
