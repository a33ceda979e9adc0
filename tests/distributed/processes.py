"""Starting two processes that share a task, and reading what each of them found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def run_two(worker: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """What each of two processes found.

    Args:
        worker: a module of `tests.distributed` that writes `rank0.json` and `rank1.json`.
        folder: given to it.
        *options: given to it as well.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}",
        "-m", f"tests.distributed.{worker}", str(folder), *options,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    # A process that waited for the other one would be killed here.
    run = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200, check=False
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
