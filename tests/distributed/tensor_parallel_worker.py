"""One of two processes that share the heads of a model; writes how far each scheme is from one process.

`torchrun --nproc_per_node 2 -m tests.distributed.tensor_parallel_worker FOLDER`
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
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_posenc import AlibiConfig, ComposedConfig, CopeConfig, ForgetGateConfig, UnsupportedError, patch_model
from tests.matrix.running import distance, patched, strengthen, tokens
from tests.schemes.table import VARIANTS

YARN = {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16}}
#: One scheme for each way in which heads are cut; saved, loaded by two processes, and saved by them.
SAVED: dict[str, Any] = {
    "native": "native",
    "rope": YARN,
    "learned": {"scheme": "learned", "num_positions": 64},
    "t5": "t5",
    "forget_gate": "forget_gate",
    "ssmax": "ssmax",
    "pope": "pope",
    "transformer_xl": "transformer_xl",
    "composed": ComposedConfig((AlibiConfig(), CopeConfig(initial_std=0.5), ForgetGateConfig())),
}
#: Number of query heads and of key heads: one key head per process, one head per process, and what cannot be shared.
HEADS = {"grouped": (4, 2), "single": (2, 2), "odd": (3, 3), "one_key": (4, 1)}


def loaded(folder: Path, plan: Any = "auto") -> Any:
    """The model of a folder, split between the two processes."""
    config = DistributedConfig(tp_plan=plan, tp_size=2)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, attn_implementation="sdpa").eval()


def full(tensor: Tensor) -> Tensor:
    """A tensor of which this process may have a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of the whole sequences."""
    return model(tokens(2, 11)).logits


@torch.no_grad()
def decoded(model: Any) -> Tensor:
    """The same, the last tokens one by one, if the scheme can extend a cache."""
    ids = tokens(2, 11)
    out = model(ids[:, :8], use_cache=True)
    found = [out.logits]
    for step in range(8, 11):
        out = model(ids[:, step : step + 1], past_key_values=out.past_key_values)
        found.append(out.logits)
    return torch.cat(found, 1)


def gradients(model: Any) -> dict[str, Tensor]:
    """Of every parameter, after two backward passes: the second one is added to the first."""
    model.zero_grad()
    for _ in range(2):
        model(tokens(2, 11), labels=tokens(2, 11)).loss.backward()
    return {name: full(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of gradients, as a share of the expected one, and where it is."""
    assert found.keys() == expected.keys()
    # Gradients that are rounding themselves (a bias of all keys alike) have no share.
    shares = {
        name: float((found[name] - value).norm() / max(float(value.norm()), 1e-4)) for name, value in expected.items()
    }
    worst = max(shares, key=lambda name: shares[name])
    return shares[worst], worst


def refusal(run: Any) -> str:
    """The words of a refusal, empty where there is none."""
    try:
        run()
    except UnsupportedError as error:
        return str(error)
    return ""


def placed(split: Any, whole: Any, scheme: Any) -> dict[str, Any]:
    """A scheme put into a model that is split already, beside one that is not."""
    # Every process draws other parameters; the first one's count.
    torch.manual_seed(7 + dist.get_rank())
    patch_model(split, scheme)
    torch.manual_seed(7)
    patch_model(whole, scheme)
    names = {name for name, _ in whole.named_parameters() if "position_encoding" in name}
    same = all(
        torch.equal(weight, dict(split.named_parameters())[name])
        for name, weight in whole.named_parameters()
        if name in names
    )
    for model in (split, whole):
        strengthen(model)
    result: dict[str, Any] = {"same": same, "forward": distance(logits(split), logits(whole))}
    words = refusal(lambda: decoded(whole))
    if words:
        assert refusal(lambda: decoded(split)) == words
    else:
        result["decoded"] = distance(decoded(split), decoded(whole))
    for model in (split, whole):
        model.train()
    torch.manual_seed(11)
    expected = gradients(whole)
    torch.manual_seed(11)
    result["gradients"], result["where"] = largest(gradients(split), expected)
    result["trained"] = sum(name in expected for name in names)
    for model in (split, whole):
        model.eval()
    return result


def saved(scheme: Any, folder: Path) -> dict[str, Any]:
    """A patched checkpoint that two processes load and save again."""
    first = dist.get_rank() == 0
    whole = patched("llama_gqa", scheme)
    if first:
        whole.save_pretrained(folder / "one")
    dist.barrier()
    split = loaded(folder / "one")
    result = {"forward": distance(logits(split), logits(whole))}
    split.save_pretrained(folder / "two", is_main_process=first)
    dist.barrier()
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    result["files"] = float(one.keys() != two.keys() or any(not torch.equal(one[name], two[name]) for name in one))
    again = AutoModelForCausalLM.from_pretrained(folder / "two").eval()
    result["again"] = distance(logits(again), logits(whole))
    return result


def stock_in(folder: Path, name: str) -> Path:
    """A stock model with some number of heads, written by the first process."""
    query, key = HEADS[name]
    if dist.get_rank() == 0:
        whole = patched("llama_gqa", None, num_attention_heads=query, num_key_value_heads=key, head_dim=8)
        whole.save_pretrained(folder / name)
    dist.barrier()
    return folder / name


def main(folder: Path) -> None:
    """Runs every scheme every way."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for heads in sys.argv[2:] or ("grouped", "single"):
        path = stock_in(folder, heads)
        split, whole = loaded(path), AutoModelForCausalLM.from_pretrained(path).eval()
        for name, config, case in VARIANTS:
            if heads == "single" and case != f"{name}-0":
                continue
            print(rank, case, __import__("time").time(), file=sys.stderr, flush=True)
            try:
                found[f"{heads}/{case}"] = placed(split, whole, config)
            except Exception as error:
                found[f"{heads}/{case}"] = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    for name, scheme in SAVED.items():
        found[f"saved/{name}"] = saved(scheme, folder / f"saved-{name}")
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
