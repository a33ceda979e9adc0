"""Tests of devices other than the CPU.

`tests/devices/test_strict_device.py` runs them on the strict device, in separate processes. On a GPU:

    python -m pytest tests/devices/inside --device cuda --placement one -m "slow or not slow"

`--placement split` needs two GPUs; `cpu` and `disk` take one.
"""

from __future__ import annotations

from tests.devices import spreading


def pytest_ignore_collect() -> bool | None:
    """Leaves them out on the CPU."""
    return None if spreading.device else True
