"""Which tests a run has: those of whole programs only on request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.schedule import leaves_long_tests_out

ROOT = Path(__file__).resolve().parents[1]
#: What runs the tests that a run of the whole suite leaves out.
COMMAND = ".venv/bin/python -m pytest -n auto -m 'long and not slow'"


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        (["tests"], {}, True),
        (["."], {}, True),
        ([str(ROOT / "tests")], {}, True),
        (["tests", "tests/test_wheel.py"], {}, True),
        (["tests/devices"], {}, False),
        (["tests/test_wheel.py"], {}, False),
        (["tests/test_wheel.py::test_name"], {}, False),
        (["tests"], {"long": True}, False),
        (["tests"], {"markexpr": "long and not slow"}, False),
        (["tests"], {"keyword": "wheel"}, False),
    ],
)
def test_long_tests_are_left_out_of_the_whole_suite_only(words: list[str], options: dict[str, Any], expected: bool):
    known = {"markexpr": "not slow", "keyword": "", "long": False} | options
    config = SimpleNamespace(
        rootpath=ROOT, invocation_params=SimpleNamespace(dir=ROOT), args=words, getoption=known.__getitem__
    )
    assert leaves_long_tests_out(cast(pytest.Config, config)) is expected


def test_continuous_integration_runs_them_too_and_the_default_is_no_choice() -> None:
    assert "-m 'not slow'" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert COMMAND in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert COMMAND.removeprefix(".venv/bin/") in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
