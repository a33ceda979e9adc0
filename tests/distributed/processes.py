"""Two processes that share a task, and what each of them found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.fresh import run_together
from tests.matrix.running import distance, tokens


def run_two(worker: str, folder: Path, *, everything: bool = False) -> list[dict[str, Any]]:
    """What each of two processes found.

    Args:
        worker: a module of `tests.distributed` whose `main` takes a folder and `everything`, and returns findings.
    """
    program = (
        "import sys; from pathlib import Path; from tests.distributed.processes import take_part\n"
        f"from tests.distributed.{worker} import main\n"
        f"take_part(main, Path(sys.argv[1]), {everything})"
    )
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in "01"]
    done = run_together(program, folder, environments=ranks)
    if -signal.SIGSEGV in [one.returncode for one in done]:
        # Gloo's own thread (pt_gloo_runloop) crashes now and then with torch 2.13. An error of ours is no signal.
        shutil.rmtree(folder)
        folder.mkdir()
        done = run_together(program, folder, environments=ranks)
    failed = [f"rank {rank} ended with {one.returncode}: {one.stderr[-6000:]}" for rank, one in enumerate(done)]
    assert all(one.returncode == 0 for one in done), "\n".join(failed)
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def take_part(main: Callable[..., dict[str, Any]], folder: Path, everything: bool) -> None:
    """What each of the processes does.

    They find each other by a file, since a free port may be taken before it is used. Each waits for the other's
    findings before it ends: a process that leaves a barrier of gloo first may close the connection on the other.
    """
    transformers.utils.logging.disable_progress_bar()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = main(folder, everything=everything)
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    while not (folder / f"rank{1 - rank}.json").exists():
        time.sleep(0.05)
    os._exit(0)


def full(tensor: Tensor) -> Tensor:
    """A tensor of which this process may have a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def resaved(whole: Any, folder: Path, **shares: Any) -> dict[str, float]:
    """The differences of a patched model that two processes load, and of what they save, from the model of one."""
    first = dist.get_rank() == 0
    if first:
        whole.save_pretrained(folder / "one")
    dist.barrier()
    config = DistributedConfig(**shares)
    model = AutoModelForCausalLM.from_pretrained(folder / "one", distributed_config=config).eval()
    result = {"forward": distance(model(tokens()).logits, whole(tokens()).logits)}
    model.save_pretrained(folder / "two", is_main_process=first)
    dist.barrier()
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    result["files"] = float(one.keys() != two.keys() or any(not torch.equal(one[name], two[name]) for name in one))
    again = AutoModelForCausalLM.from_pretrained(folder / "two").eval()
    return result | {"again": distance(again(tokens()).logits, whole(tokens()).logits)}


def largest(found: dict[str, Tensor], expected: dict[str, Tensor], small: float = 1e-3) -> tuple[float, str]:
    """The largest difference of gradients, as a share of the expected one, and where it is.

    What softmax does not see (a bias of all keys alike) has a gradient that is rounding itself.

    Args:
        small: gradients below this share of the largest one count as large as that.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    least = small * max(float(value.norm()) for value in expected.values())
    shares = {
        name: float((found[name] - value).norm() / max(float(value.norm()), least)) for name, value in expected.items()
    }
    worst = max(shares, key=lambda name: shares[name])
    return shares[worst], worst
