"""One of two processes that load models split between them; writes what happened to each scheme.

`torchrun --nproc_per_node 2 tests/patching/tensor_parallel_worker.py FOLDER`
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_posenc import UnsupportedError, patch_model
from tests.matrix.running import distance, patched, tokens

YARN = {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16}}
SCHEMES: dict[str, Any] = {
    "native": "native",
    "none": "none",
    "rope": YARN,
    "sinusoidal": "sinusoidal",
    "log_n_scale": "log_n_scale",
    "alibi": "alibi",
    "t5": "t5",
    "kerple": "kerple",
    "forget_gate": "forget_gate",
    "ssmax": "ssmax",
    "pope": "pope",
}


@torch.no_grad()
def compared(scheme: Any, folder: Path, first: bool, *, saved: bool) -> float | str:
    """The difference to the same model in one process, or the words of the refusal.

    Args:
        scheme: to patch with.
        folder: where the model may be written.
        first: whether this process writes it.
        saved: whether the scheme is in the checkpoint that is loaded, or is placed in a model that is split already.
    """
    whole = patched("llama_gqa", scheme if saved else None)
    if first:
        whole.save_pretrained(folder)
    dist.barrier()
    try:
        split = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2), attn_implementation="sdpa"
        ).eval()
        if not saved:
            split = patch_model(split, scheme)
            whole = patch_model(whole, scheme)
        ids = tokens(2, 11)
        result: float | str = distance(split(ids).logits, whole(ids).logits)
    except UnsupportedError as error:
        result = str(error)
    dist.barrier()
    return result


def main(folder: Path) -> None:
    """Runs every scheme both ways."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {
        way: {
            name: compared(scheme, folder / f"{way}-{name}", rank == 0, saved=way == "saved")
            for name, scheme in SCHEMES.items()
        }
        for way in ("saved", "placed")
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
