"""Runs the scripts of this folder as processes that do not see the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.errors import BenchmarkError


def run_script(name: str, source: Path, **task: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Runs a task.

    Args:
        name: of the script.
        source: the model's file or folder.
        **task: see the script.

    Returns:
        The arrays, and everything else that it has found.

    Raises:
        BenchmarkError: with its last messages, if it fails.
    """
    with tempfile.TemporaryDirectory() as results:
        place = {"source": str(source), "results": results, "threads": torch.get_num_threads()}
        # -P: neither the working folder nor this folder is on the import path.
        command = [sys.executable, "-P", str(Path(__file__).with_name(name))]
        ran = subprocess.run(
            command, input=json.dumps(place | task), capture_output=True, text=True, check=False, cwd=results
        )
        if ran.returncode != 0:
            messages = "\n".join(ran.stderr.strip().splitlines()[-8:])
            raise BenchmarkError(f"{name} has failed on {source.name}:\n{messages}")
        with np.load(Path(results, "arrays.npz")) as file:
            arrays = dict(file)
        others: dict[str, Any] = json.loads(Path(results, "found.json").read_text())
    return arrays, others
