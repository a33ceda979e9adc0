from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from tests.checkpoint.checkpoint_cases import CASES, randomize, write_reference
from tests.fresh import run_fresh

torch.set_num_threads(1)


def results_of(mode: str, root: Path) -> dict[str, Any]:
    """What `fresh_process.py` finds."""
    script = Path(__file__).with_name("fresh_process.py")
    done = run_fresh(script.read_text(), mode, root, environment={"TOKENIZERS_PARALLELISM": "false"})
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one patched checkpoint per case, some also sharded and saved with an explicit state dict."""
    root = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        torch.manual_seed(0)
        model = randomize(hf_posenc.patch_model(case.build(), case.scheme, **case.options))
        folder = root / case.name
        model.save_pretrained(folder)
        if case.every_route:
            model.save_pretrained(folder / "sharded", max_shard_size="20KB")
            model.save_pretrained(folder / "state_dict", state_dict=model.state_dict())
        write_reference(model, folder)
    return root


@pytest.fixture(scope="session")
def fresh() -> Callable[[str, Path], dict[str, Any]]:
    return results_of
