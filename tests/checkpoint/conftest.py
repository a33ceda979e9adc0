from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from tests.checkpoint.checkpoint_cases import CASES, randomize, write_reference

torch.set_num_threads(1)

REPOSITORY = Path(__file__).parents[2]


def run_fresh(mode: str, root: Path) -> dict[str, Any]:
    """`fresh_process.py` in a new interpreter."""
    script = REPOSITORY / "tests" / "checkpoint" / "fresh_process.py"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, str(script), mode, str(root)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one patched checkpoint per case, each also sharded and saved with an explicit state dict."""
    root = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        torch.manual_seed(0)
        model = randomize(hf_posenc.patch_model(case.build(), case.scheme, **case.options))
        folder = root / case.name
        model.save_pretrained(folder)
        model.save_pretrained(folder / "sharded", max_shard_size="20KB")
        model.save_pretrained(folder / "state_dict", state_dict=model.state_dict())
        write_reference(model, folder)
    return root


@pytest.fixture(scope="session")
def fresh() -> Callable[[str, Path], dict[str, Any]]:
    return run_fresh
