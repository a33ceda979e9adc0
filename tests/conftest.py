"""For all tests."""

from __future__ import annotations

import gc

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda` makes every tensor and module that a test creates one of the GPU; the GPU kit asks for it."""
    parser.addoption("--device", default="cpu", help="where tests create their tensors and modules: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the device before any module of tests is imported."""
    device = config.getoption("--device")
    if device == "cpu":
        return
    torch.set_default_device(device)
    torch.Generator = _generator_of(device)  # type: ignore[misc]


def pytest_collection_finish() -> None:
    """Takes what imports and collection have made out of the garbage collector's sight.

    accelerate collects after every tensor it places, which costs 0.3 s each time over all of torch's objects.
    """
    gc.collect()
    gc.freeze()


def _generator_of(device: str) -> type[torch.Generator]:
    """A class of generators that are of a device by default, which the default device does not see to."""

    class DeviceGenerator(torch.Generator):
        def __new__(cls, device: torch.device | str = device) -> torch.Generator:
            return super().__new__(cls, device)

    return DeviceGenerator
