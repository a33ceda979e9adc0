"""Distances of tensors, rank correlation, and intervals of fractions."""

import math

import pytest
import torch

from hf_posenc.metrics.statistics import cosine_distance, relative_changes, relative_l2, spearman, wilson_interval

VECTOR, ZERO = torch.tensor([3.0, 0.0]), torch.zeros(2)


@pytest.mark.parametrize(
    ("first", "second", "relative", "cosine"),
    [
        (VECTOR, torch.tensor([0.0, 1.0]), 10**0.5 / 2, 1),
        (VECTOR, -VECTOR, 2, 2),
        (VECTOR, VECTOR.clone(), 0, 0),
        (VECTOR, ZERO, 2, 1),
        (ZERO, ZERO, 0, 0),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]), 2 / (1 + 2**0.5), 1 - 0.5**0.5),
        # The norm alone overflows float16.
        (torch.full((4096,), 300.0, dtype=torch.float16), torch.full((4096,), -300.0, dtype=torch.float16), 2, 2),
        # One minus the cosine is 0 here.
        (torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 1e-9]).double(), 1e-9, 5e-19),
    ],
)
def test_distances(first, second, relative, cosine):
    assert relative_l2(first, second) == pytest.approx(relative, rel=1e-6, abs=0)
    assert cosine_distance(first, second) == pytest.approx(cosine, rel=1e-6, abs=0)
    rows = relative_changes(torch.stack([first, second]), torch.stack([second, second]))
    assert rows.tolist() == pytest.approx([relative, 0], rel=1e-6, abs=0)


def test_spearman():
    assert spearman(torch.arange(5), torch.tensor([9.0, 7.0, 5.0, 3.0, 1.0])) == pytest.approx(-1)
    assert spearman(torch.arange(5), torch.full((5,), 3.0)) == 0
    # By hand: ranks 1.5 1.5 3 4 against 1 2 3 4 have the covariance 4.5 of 4.5 and 5.
    assert spearman(torch.arange(4), torch.tensor([2.0, 2.0, 5.0, 8.0])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (four decimals), and the last but one mirrored.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (1, 29, (0.0061, 0.1718)),
        (0, 20, (0.0, 0.1611)),
        (20, 20, (1 - 0.1611, 1.0)),
    ],
)
def test_published_intervals(successes, trials, interval):
    assert wilson_interval(successes, trials) == pytest.approx(interval, abs=5e-5)


def test_intervals_are_exact_at_0_and_1():
    for trials in range(1, 500):
        assert wilson_interval(0, trials)[0] == 0
        assert wilson_interval(trials, trials)[1] == 1
