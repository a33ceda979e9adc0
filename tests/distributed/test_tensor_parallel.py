"""Two processes that share the heads of each layer: equal to one process, or refused on both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import UnsupportedError
from tests.matrix.running import patched, tokens
from tests.patching.tensor_parallel_worker import SCHEMES

REPOSITORY = Path(__file__).parents[2]
SPLIT = "Tensor parallelism has split the 4 heads of LlamaAttention over 2 processes, and the scheme {name!r} needs all"
REFUSED = {
    "alibi": "its AlibiBias has numbers of its own for each head",
    "t5": "its T5Bias has numbers of its own for each head",
    "kerple": "its KerpleBias has numbers of its own for each head",
    "forget_gate": "its ForgetGateBias has numbers of its own for each head",
    "pope": "its PopeMap maps all heads at once",
    "ssmax": "The scheme has numbers of its own for each of 4 heads, and this layer computes 2",
}


def run_two_processes(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """What each of the two processes found, by way and scheme."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}",
        "tests/patching/tensor_parallel_worker.py", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    # A process that waited for the other one would be killed here.
    run = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def test_two_processes_are_one_or_both_refuse(tmp_path: Path) -> None:
    """One test, because starting the processes takes far longer than what they do."""
    for rank in run_two_processes(tmp_path):
        for way in ("saved", "placed"):
            for name in SCHEMES:
                words = rank[way][name]
                if name not in REFUSED:
                    # Sums in another order: 1e-6, beside differences of 1 between schemes.
                    assert words <= 1e-5, (way, name, words)
                    continue
                assert REFUSED[name] in words
                assert "without tp_plan" in words
                assert name == "ssmax" or SPLIT.format(name=name) in words


@pytest.mark.parametrize("scheme", ["alibi", "ssmax"])
def test_heads_that_somebody_else_has_split_are_noticed(scheme: str) -> None:
    """Half of the projections, as a hand-written plan leaves them."""
    model = patched("llama_gqa", scheme)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name)
            projection.weight = torch.nn.Parameter(projection.weight[: len(projection.weight) // 2])
    with pytest.raises(UnsupportedError, match="for each of 4 heads, and this layer computes 2"):
        model(tokens())
