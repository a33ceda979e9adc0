"""How sure a fraction is."""

from __future__ import annotations

import math

#: The 97.5 % quantile of the normal distribution: two sides of 2.5 %.
_NORMAL_QUANTILE = 1.959963984540054


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % confidence interval of a fraction (Wilson 1927, "Probable inference", J. Am. Stat. Assoc. 22).

    Unlike the normal interval it stays between 0 and 1, and has a width even where all trials or none succeeded.

    Args:
        successes: how many.
        trials: of how many, 1 or more.

    Raises:
        ValueError: for other counts.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is no fraction of trials.")
    square = _NORMAL_QUANTILE**2
    fraction = successes / trials
    centre = (fraction + square / (2 * trials)) / (1 + square / trials)
    spread = math.sqrt(fraction * (1 - fraction) / trials + square / (4 * trials**2))
    half = _NORMAL_QUANTILE * spread / (1 + square / trials)
    # The ends at 0 and 1 are exact; rounding must not leave them a little off.
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half
