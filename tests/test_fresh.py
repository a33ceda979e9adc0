"""Fresh processes of tests equal a new interpreter after the imports."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_posenc
from tests.fresh import run_fresh, run_together

REPORT = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ.get("ASKED"), "torch" in sys.modules, "hf_posenc" in sys.modules)
print("to the other stream", file=sys.stderr)
sys.exit(3)
"""


def test_a_program_runs_as_a_new_interpreter_would_run_it(tmp_path: Path) -> None:
    assert hf_posenc.__name__
    done = run_fresh(REPORT, "x", 1, folder=tmp_path, environment={"ASKED": "yes"})
    assert done.stdout == f"__main__ ['-c', 'x', '1'] {tmp_path} yes True False\n"
    assert done.stderr == "to the other stream\n"
    assert done.returncode == 3


def test_nothing_stays_from_one_program_to_the_next() -> None:
    first = "import transformers, hf_posenc; transformers.left = 1"
    second = "import sys, transformers; print(hasattr(transformers, 'left'), 'hf_posenc' in sys.modules)"
    assert run_fresh(first).returncode == 0
    assert run_fresh(second).stdout == "False False\n"


def test_a_program_that_does_not_end_is_killed() -> None:
    with pytest.raises(TimeoutError, match="within 1 s"):
        run_fresh("import time; time.sleep(600)", timeout=1.0)


def test_a_process_that_fails_ends_those_beside_it() -> None:
    program = "import os, time; os.environ['RANK'] == '0' and exit(4); time.sleep(600)"
    first, second = run_together(program, environments=[{"RANK": "0"}, {"RANK": "1"}])
    assert first.returncode == 4
    assert second.returncode < 0
