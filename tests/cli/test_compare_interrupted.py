"""`hf-posenc compare` ends as the study does: with its message and its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hf_posenc.cli import running

STUDY = """
import signal, sys, time
try:
    print("started", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # it saves its work
    print("Interrupted.", file=sys.stderr)
    sys.exit(130)
"""
COMMAND = """
import pathlib, sys
from hf_posenc.cli import running
running.scripts_folder = pathlib.Path.cwd
sys.exit(running.start('compare', [], []))
"""


def test_an_interrupted_study_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "compare.py").write_text(STUDY)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
        env={"PYTHONPATH": str(Path(running.__file__).parents[2]), "PATH": ""},
        # A shell ignores interrupts in background jobs, and a test suite may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.1)
        # As the terminal does: to the whole group.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted." in errors
    assert "Traceback" not in errors
