import pytest
from hypothesis import given, strategies as st

from hf_posenc.metrics.statistics import wilson_interval


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
