"""How sure differences are: against scipy, simulations, and cases that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from docs.study.significance import (
    difference_over_texts,
    holm,
    mean_difference,
    p_equivalent,
    p_less,
    paired,
    prediction,
    share,
)
from training.errors import SettingsError


def test_seeds_are_paired_and_those_of_one_scheme_are_left_out() -> None:
    differences = paired({0: 1.0, 2: 3.0, 1: 2.0}, {1: 1.5, 2: 2.0, 5: 0.0})
    assert differences.tolist() == [0.5, 1.0]
    with pytest.raises(SettingsError, match="these have 1"):
        paired({0: 1.0}, {0: 2.0, 1: 3.0})


def test_the_interval_of_a_mean_is_students() -> None:
    """Five differences: 2.776 standard errors, from the table of Student's t with four degrees of freedom."""
    differences = [0.1, 0.2, 0.3, 0.4, 0.5]
    error = np.std(differences, ddof=1) / np.sqrt(5)
    interval = mean_difference(differences)
    assert interval.value == pytest.approx(0.3)
    assert (interval.low, interval.high) == pytest.approx((0.3 - 2.776 * error, 0.3 + 2.776 * error), abs=1e-4)
    assert str(interval) == "0.300 [0.104, 0.496]"


def test_one_more_training_is_inside_the_interval_of_prediction_as_often_as_it_says() -> None:
    """Of 2,000 simulated ones after 5 seeds; 95 % with a standard error of 0.5 %."""
    draws = np.random.default_rng(0).normal(1.2, 0.01, (2000, 6))
    intervals = [prediction(draw[:5]) for draw in draws]
    inside = [draw.low <= new <= draw.high for draw, new in zip(intervals, draws[:, 5], strict=True)]
    assert np.mean(inside) == pytest.approx(0.95, abs=4 * 0.005)
    assert intervals[0].value == pytest.approx(draws[0, :5].mean())


def test_less_is_one_sided() -> None:
    differences = [-0.3, -0.2, -0.4, -0.1]
    assert p_less(differences) == pytest.approx(stats.ttest_rel([0, 0, 0, 0], [0.3, 0.2, 0.4, 0.1]).pvalue / 2)
    assert p_less([-value for value in differences]) == pytest.approx(1 - p_less(differences))


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


def test_texts_of_one_document_count_as_one() -> None:
    """Sixteen neighbours are alike, so that 256 texts say as much as 16."""
    generator = np.random.default_rng(1)
    first = generator.normal(0, 0.001, (5, 1)) + np.repeat(generator.normal(0, 0.05, (1, 16)), 16, axis=1)
    naive, clustered = (difference_over_texts(first, np.zeros_like(first), neighbours=count) for count in (1, 16))
    assert clustered.high - clustered.low > 2 * (naive.high - naive.low)


def test_texts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="expected \\(seeds, texts\\) twice"):
        difference_over_texts(np.zeros((6, 30)), np.zeros((6, 2)))


def test_shares_that_vary_are_less_certain_than_their_number_of_answers() -> None:
    alike, varied = share([50] * 6, [100] * 6), share([0, 100, 0, 100, 0, 100], [100] * 6)
    assert alike.value == varied.value == 0.5
    assert 0.4 < alike.low < alike.high < 0.6
    assert varied.low < 0.3
    assert varied.high > 0.7


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 6), st.integers(1, 50))
def test_shares_of_nothing_and_everything_have_a_width(trainings: int, trials: int) -> None:
    nothing = share([0] * trainings, [trials] * trainings)
    everything = share([trials] * trainings, [trials] * trainings)
    assert 0 <= nothing.low < nothing.high < 1
    assert nothing.value == 0
    assert (everything.low, everything.high) == pytest.approx((1 - nothing.high, 1 - nothing.low), abs=0.01)
