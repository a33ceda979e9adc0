"""The repository's own tests on the device, a file at a time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.kits.gpu.rows import CRASHED, OK, SKIPPED, WRONG, Row

_ROOT = Path(__file__).resolve().parents[3]
_FOLDERS = ("attention", "oracles", "matrix", "patching")


def suites() -> list[str]:
    """A cell for each file of tests."""
    files = [file for folder in _FOLDERS for file in sorted((_ROOT / "tests" / folder).glob("test_*.py"))]
    return [f"pytest {file.relative_to(_ROOT).as_posix()}" for file in files]


def run_suite(cell: str, device: str) -> Row:
    """Runs the tests of one file on a device."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": SKIPPED, "reason": "pytest is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["pytest", cell.removeprefix("pytest "), "--device", device, "-q", f"--junitxml={report}"]
        status = subprocess.run([sys.executable, "-m", *words], cwd=_ROOT, check=False).returncode
        return read_report(report, status)


def read_report(report: Path, status: int) -> Row:
    """A row from a report of pytest.

    Args:
        report: what `--junitxml` wrote, if pytest came that far.
        status: the exit status of pytest.
    """
    # All passed; some failed; there was nothing to run.
    if status not in (0, 1, 5) or not report.is_file():
        return {"status": CRASHED, "reason": f"pytest ended with status {status}"}
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.attrib['name']} - {(failure.get('message') or '').splitlines()[0][:200]}"
        for case in suite.iter("testcase")
        for failure in (*case.findall("failure"), *case.findall("error"))
    ]
    reason = {"reason": "; ".join(failed)} if failed else {}
    return {"status": WRONG if failed else OK, "counts": counts} | reason
