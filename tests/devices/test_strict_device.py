"""Runs tests on the strict device, in separate processes: the models on one device, or spread over two.

`pytest -m slow tests/devices` runs all schemes, architectures and placements.
"""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from tests.devices import strict_device
from tests.fresh import printed, run_python

pytestmark = pytest.mark.long

INSIDE, ON_ONE = "tests/devices/inside", "tests/devices/inside/test_waits.py tests/devices/inside/test_kernels.py"
MATRIX = "tests/matrix/test_behaviour.py"
#: What the stock model cannot do while accelerate keeps its weights elsewhere: be cast, or have its weights compared.
NOT_OFFLOADED = "not bfloat16 and not effect_and_undo"


def on_strict_device(tests: str, placement: str, *options: str) -> CompletedProcess[str]:
    """Runs pytest in a separate process."""
    words = [*tests.split(), "--device", "strict", "--placement", placement, "-q", "-p", "no:cacheprovider", *options]
    return run_python("-m", "pytest", *words, environment={"OMP_NUM_THREADS": "1"})


def of_all(tests: str, placement: str) -> list[str]:
    """Options with which everything runs that the stock model can do there, too."""
    offloaded = ["-k", NOT_OFFLOADED] if tests == MATRIX and placement in ("cpu", "disk") else []
    return ["-m", "slow or not slow", *offloaded]


def _run(tests: str, placement: str, *options: str) -> None:
    missing = strict_device.missing()
    if missing is not None:
        pytest.skip(missing)
    printed(on_strict_device(tests, placement, *options))


def test_models_that_are_split_over_two_devices() -> None:
    _run(INSIDE, "split")


def test_the_behaviours_of_a_split_model() -> None:
    # `wavelet` has no weights, so its layers on both devices have one part.
    _run(MATRIX, "split", "-k", "gpt2 or (wavelet and decoding)")


def test_waits_and_kernels_of_one_device() -> None:
    _run(ON_ONE, "one")


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["one", "split", "cpu", "disk"])
@pytest.mark.parametrize("tests", [INSIDE, MATRIX])
def test_everything(tests: str, placement: str) -> None:
    _run(tests, placement, *of_all(tests, placement))
