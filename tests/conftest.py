"""For all tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything reads it: a test needs no network, and a hub that cannot be reached is asked again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.devices import spreading
from tests.schedule import leaves_long_tests_out, longest_first, whole_files


class DeviceGenerator(torch.Generator):
    """A generator that is of the default device by default, which torch does not see to."""

    def __new__(cls, device: torch.device | str | None = None) -> DeviceGenerator:
        return super().__new__(cls, torch.get_default_device() if device is None else device)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undoes what a test or a library does to the variables of the process.

    peft leaves `CXX=gcc` behind when BOFT cannot compile its kernel, and inductor then links without C++.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """For the tests of a file, most of which need none."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser of playwright. Skips the test where playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda` makes every tensor and module that a test creates one of the GPU; the GPU kit asks for it."""
    parser.addoption("--device", default="cpu", help="where tests create their tensors and modules: cpu, cuda, strict")
    parser.addoption("--long", action="store_true", help="run the tests marked long in a run of the whole suite, too")
    parser.addoption("--placement", default="one", help="where the layers of models are: one device, split, cpu, disk")


def pytest_configure(config: pytest.Config) -> None:
    """Sets threads and the device before any module of tests is imported."""
    # Tiny models are not faster with more, and sums keep their order.
    torch.set_num_threads(1)
    if hasattr(config, "workerinput"):
        # There are as many workers as cores, and each starts processes of its own.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = config.getoption("--device")
    if device == "cpu":
        return
    if device == "strict":
        from tests.devices import strict_device

        strict_device.load()
    spreading.device, spreading.placement = device, config.getoption("--placement")
    torch.set_default_device(device)
    torch.Generator = DeviceGenerator  # type: ignore[misc]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first, tests marked long are left out of the whole suite, and those of the CPU elsewhere."""
    longest_first(items)
    if leaves_long_tests_out(config):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if config.getoption("--device") != "cpu":
        for item in items:
            for marker in item.iter_markers("on_cpu"):
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says that tests were left out, and how they are run."""
    if leaves_long_tests_out(config):
        terminalreporter.write_line("Tests marked long were left out. Run them: pytest -n auto -m 'long and not slow'")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`-n` deals out whole files, unless `--dist` asks for something else."""
    return whole_files(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Objects made by imports and collection stay."""
    _freeze()


_started: set[Path] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """So does what the tests of the files before have imported and compiled: the number of objects triples."""
    if item.path not in _started:
        _started.add(item.path)
        _freeze()


def _freeze() -> None:
    """Takes all objects that are in use out of the garbage collector's sight.

    accelerate collects after every tensor it places, which costs 0.3 s each time over all of torch's objects.
    """
    gc.collect()
    gc.freeze()
