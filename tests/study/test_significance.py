"""Intervals and tests of differences: against scipy, simulations, and known cases."""

from __future__ import annotations

import numpy as np
import pytest

from docs.study.significance import (
    difference_over_texts,
    holm,
    mean_difference,
    p_equivalent,
)
from training.errors import SettingsError


def test_the_interval_of_a_mean_is_students() -> None:
    """Five differences: 2.776 standard errors, from the table of Student's t with four degrees of freedom."""
    differences = [0.1, 0.2, 0.3, 0.4, 0.5]
    error = np.std(differences, ddof=1) / np.sqrt(5)
    interval = mean_difference(differences)
    assert interval.value == pytest.approx(0.3)
    assert (interval.low, interval.high) == pytest.approx((0.3 - 2.776 * error, 0.3 + 2.776 * error), abs=1e-4)
    assert str(interval) == "0.300 [0.104, 0.496]"


def test_equivalence_needs_small_differences_that_are_certain() -> None:
    assert p_equivalent([0.001, -0.001, 0.002, 0.0], 0.01) < 0.01
    # As small, but far from certain: no significant difference, and no equivalence either.
    assert p_equivalent([0.05, -0.05, 0.04, -0.04], 0.01) > 0.3
    # Certain, and not small.
    assert p_equivalent([0.020, 0.021, 0.019, 0.020], 0.01) > 0.99


def test_holm_of_a_known_case() -> None:
    """The example of Wikipedia's page on the method: four tests at 0.01, 0.04, 0.03 and 0.005."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_the_interval_over_seeds_and_texts_covers_a_known_difference() -> None:
    """Of 300 simulated studies with 5 seeds; fewer than 273 covering ones have a chance below 1e-3 at 95 %."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        of_seeds, of_texts = generator.normal(0, 0.02, (5, 1)), generator.normal(0, 0.05, (1, 40))
        first = 0.1 + of_seeds + of_texts + generator.normal(0, 0.02, (5, 40))
        interval = difference_over_texts(first, np.zeros_like(first))
        covered += interval.low <= 0.1 <= interval.high
    assert 273 <= covered < 300


def test_texts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="expected \\(seeds, texts\\) twice"):
        difference_over_texts(np.zeros((6, 30)), np.zeros((6, 2)))
