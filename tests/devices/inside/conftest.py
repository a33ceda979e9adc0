"""Tests of the strict device; `tests/devices/test_strict_device.py` runs them in processes of their own."""

from __future__ import annotations

from tests.devices import strict_device


def pytest_ignore_collect() -> bool | None:
    """Leaves them out where there is no strict device."""
    return True if strict_device.loaded is None else None
