"""Distances of tensors, rank correlation, and intervals of fractions."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from hf_posenc.metrics.statistics import cosine_distance, relative_changes, relative_l2, spearman, wilson_interval


def test_relative_l2_has_the_mean_length_as_its_unit():
    first, second = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])
    assert relative_l2(first, second) == pytest.approx(10**0.5 / 2)
    assert relative_l2(first, -first) == pytest.approx(2.0)
    assert relative_l2(100 * first, 100 * second) == pytest.approx(relative_l2(first, second))


def test_cosine_distance_is_one_minus_the_cosine():
    torch.manual_seed(0)
    first, second = torch.randn(2, 50)
    expected = 1 - torch.nn.functional.cosine_similarity(first, second, dim=0).item()
    assert cosine_distance(first, second) == pytest.approx(expected, abs=1e-6)
    assert cosine_distance(first, -first) == pytest.approx(2.0)


def test_cosine_distance_resolves_differences_that_one_minus_the_cosine_loses():
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    second = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert 1 - torch.nn.functional.cosine_similarity(first, second, dim=0).item() == 0.0
    assert cosine_distance(first, second) == pytest.approx(5e-19)


def test_equal_and_zero_vectors():
    vector, zero = torch.randn(7), torch.zeros(7)
    assert relative_l2(vector, vector.clone()) == 0.0
    assert cosine_distance(vector, vector.clone()) == 0.0
    assert relative_l2(zero, zero) == 0.0
    assert cosine_distance(zero, zero) == 0.0
    assert relative_l2(vector, zero) == pytest.approx(2.0)
    assert cosine_distance(vector, zero) == 1.0


def test_low_precision_is_compared_in_float64():
    first = torch.full((4096,), 300.0, dtype=torch.float16)
    assert relative_l2(first, -first) == pytest.approx(2.0)  # the norm alone overflows float16


def test_changes_by_row_are_the_distances_of_the_rows():
    first, second = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    second[0] = first[0] = 0
    expected = [relative_l2(one, other) for one, other in zip(first, second, strict=True)]
    assert relative_changes(first, second).tolist() == pytest.approx(expected)


def test_spearman():
    assert spearman(torch.arange(5), torch.tensor([9.0, 7.0, 5.0, 3.0, 1.0])) == pytest.approx(-1)
    assert spearman(torch.arange(5), torch.full((5,), 3.0)) == 0
    # By hand: ranks 1.5 1.5 3 4 against 1 2 3 4 have the covariance 4.5 of 4.5 and 5.
    assert spearman(torch.arange(4), torch.tensor([2.0, 2.0, 5.0, 8.0])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (four decimals).
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_published_intervals(successes, trials, interval):
    assert wilson_interval(successes, trials) == pytest.approx(interval, abs=5e-5)


@given(trials=st.integers(1, 500), share=st.floats(0, 1))
def test_an_interval_holds_its_fraction_and_stays_between_0_and_1(trials, share):
    successes = round(share * trials)
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high
    mirrored = wilson_interval(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 5)])
def test_what_is_no_fraction(successes, trials):
    with pytest.raises(ValueError, match="no fraction"):
        wilson_interval(successes, trials)
