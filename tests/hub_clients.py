"""Processes whose hub is a server on this machine. huggingface_hub reads the address once, when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fresh import run_fresh


class Clients:
    """Runs programs in fresh processes, which start with torch and transformers imported and without this package."""

    def __init__(self, url: str, home: Path, offline: bool = False) -> None:
        variables = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN": "hf_test"}
        variables |= {"HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_clients"],
            env=os.environ | variables | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.communicate(timeout=60)

    def __call__(self, program: str, *arguments: object) -> Any:
        """Runs a program. Returns the JSON on the last line of its output; if it is to fail, its error output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([program, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        assert done["returncode"] == 0, done["stdout"] + done["stderr"]
        return json.loads(done["stdout"].splitlines()[-1])


if __name__ == "__main__":
    for line in sys.stdin:
        words = json.loads(line)
        done = run_fresh(*words)
        print(json.dumps({"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}), flush=True)
