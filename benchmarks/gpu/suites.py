"""The repository's own tests on the device, a file at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.part import CRASHED, OK, SKIPPED, WRONG, OutOfTimeError, Row, Setup
from benchmarks.gpu.requirements import missing_optional

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("attention", "oracles", "matrix", "patching")
#: pytest's exit statuses.
_PASSED, _FAILED, _NOTHING_TO_RUN = 0, 1, 5
_MOST_NAMES = 40
_SECONDS = 220.0


def suites(setup: Setup) -> list[str]:
    """A cell for each file of tests; none in a smoke run, whose device the tests run on anyway."""
    if setup.smoke:
        return []
    files = [file for folder in _FOLDERS for file in sorted((_ROOT / "tests" / folder).glob("test_*.py"))]
    return [f"pytest {file.relative_to(_ROOT).as_posix()}" for file in files]


def run_suite(cell: str, setup: Setup) -> Row:
    """Runs the tests of one file.

    Raises:
        OutOfTimeError: if they take longer than what is left to the part, and not too long in any case.
    """
    if "pytest" in missing_optional(setup.device):
        return {"status": SKIPPED, "reason": missing_optional(setup.device)["pytest"]}
    path = cell.removeprefix("pytest ")
    command = [sys.executable, "-m", "pytest", path, "--device", setup.device, "-q", "-rfE", "--tb=line", "--color=no"]
    seconds = min(_SECONDS, setup.remaining())
    try:
        ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        if seconds < _SECONDS:
            raise OutOfTimeError from error
        return {"status": CRASHED, "reason": f"it did not end within {_SECONDS:.0f} s"}
    return read_report(ended.returncode, ended.stdout, ended.stderr)


def read_report(status: int, output: str, errors: str) -> Row:
    """A row from what pytest printed."""
    lines = output.strip().splitlines() or errors.strip().splitlines() or ["no message"]
    row: Row = {"counts": re.sub(r"^=+ | =+$", "", lines[-1])}
    if status in (_PASSED, _NOTHING_TO_RUN):
        return row | {"status": OK}
    failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if status == _FAILED:
        return row | {"status": WRONG, "reason": row["counts"], "failed": [one[:300] for one in failed[:_MOST_NAMES]]}
    return row | {"status": CRASHED, "reason": f"pytest ended with status {status}: {lines[-1][:300]}"}
