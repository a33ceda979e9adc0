"""Breaks a copy of the library in one place at a time, runs the tests that should notice, and prints a table.

    python -m tests.mutations                  # all
    python -m tests.mutations padding windows  # those whose name contains a word

A mutation is killed if a test fails. One that survives shows what no test protects. It takes about half an hour on one
core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.cases import CASES, Mutation

ROOT = Path(__file__).parents[2]
#: Seconds after which a run counts as killed: the mutation has made an endless loop.
_LIMIT = 900


def outcome(mutation: Mutation) -> str:
    """Runs the tests of one mutation on a copy of the library: "killed", "SURVIVED", or why it could not be made."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        path = copy / "hf_posenc" / mutation.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(mutation.before) != 1:
            return f"not made: the text occurs {text.count(mutation.before)} times"
        path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        code = _run(copy, mutation.tests)
        if code == 0:
            return "SURVIVED"
        path.write_text(text, encoding="utf-8")
        if code > 1 or not _passes(copy, mutation.tests):
            return "not run: the tests fail without it"
        return "killed"


_PASSES: dict[tuple[str, ...], bool] = {}


def _passes(copy: Path, tests: tuple[str, ...]) -> bool:
    """Whether the tests pass on the library as it is, looked up once for mutations with the same tests."""
    if tests not in _PASSES:
        _PASSES[tests] = _run(copy, tests) == 0
    return _PASSES[tests]


def _run(copy: Path, tests: tuple[str, ...]) -> int:
    """The exit status of pytest; 1 if it takes too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=_LIMIT).returncode
    except subprocess.TimeoutExpired:
        return 1


def main(words: list[str]) -> int:
    """Prints a row for each mutation, and returns the number of those that were not killed."""
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    if not chosen:
        sys.exit(f"No mutation has a name with {' or '.join(words)}: {', '.join(case.name for case in CASES)}.")
    print("| mutation | file | outcome |\n| --- | --- | --- |")
    left = 0
    for case in chosen:
        found = outcome(case)
        left += found != "killed"
        print(f"| {case.name} | {case.file} | {found} |", flush=True)
    print(f"\n{len(chosen) - left} of {len(chosen)} killed.")
    return left


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
