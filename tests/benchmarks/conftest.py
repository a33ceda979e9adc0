import pytest

from benchmarks import timing


@pytest.fixture(autouse=True, scope="package")
def short_measurements():
    """A measurement is one call or two, since no figure of a test is looked at closely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_SECONDS_PER_MEASUREMENT", 0.004)
        yield
