"""One of two processes that train a model on half of a batch each: how far each way is from one process."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import (
    AlibiConfig,
    ComposedConfig,
    LearnedConfig,
    PopeConfig,
    T5Config,
    UnsupportedError,
    patch_model,
    unpatch_model,
)
from hf_posenc.checkpoint.configuration import CheckpointError
from tests.distributed.processes import full, largest, resaved
from tests.matrix.running import distance, patched, tokens

LENGTH = 16
LEARNING_RATE = 0.1
#: Parameters per layer and shared ones, before, in and behind the rotary function, added ones, and none.
SCHEMES: dict[str, Any] = {
    "t5": T5Config(shared=False),
    "fire": "fire",
    "forget_gate": "forget_gate",
    "learned": ComposedConfig((LearnedConfig(num_positions=64), AlibiConfig())),
    "learned_rope": "learned_rope",
    # In the middle of its range: at the edge each process keeps the gradients that lead back, which their mean is not.
    "pope": PopeConfig(initial_delta="uniform"),
    "shaw": "shaw",
    "ssmax": "ssmax",
}
WAYS = ("ddp", "ddp compiled", "fsdp1", "fsdp1 flat", "fsdp2", "fsdp2 checkpointed", "fsdp2 bfloat16")
#: Ways that take one scheme of each kind of place, and what is run by default: a graph takes both processes long.
FEWER = {
    "ddp compiled": ("t5",),
    "fsdp2 checkpointed": ("t5", "forget_gate", "pope"),
    "fsdp2 bfloat16": ("t5", "forget_gate", "pope"),
}
QUICK = {
    "ddp": ("t5", "forget_gate", "pope"),
    "fsdp1": ("fire", "pope"),
    "fsdp1 flat": ("fire", "pope"),
    "fsdp2": tuple(SCHEMES),
    "fsdp2 checkpointed": ("forget_gate",),
    "fsdp2 bfloat16": ("t5",),
}


def stepped(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and parameters of one step."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], LEARNING_RATE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with gathered(model, with_grads=getattr(model, "_use_orig_params", False)):
        gradients = {name: full(one.grad).float() for name, one in named(model) if one.grad is not None}
    optimizer.step()
    with gathered(model):
        return float(loss), gradients, {name: full(one.detach()).float().clone() for name, one in named(model)}


def named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters by the names that they have in one process."""
    for name, parameter in model.named_parameters():
        for prefix in ("_orig_mod.", "_fsdp_wrapped_module."):
            name = name.replace(prefix, "")
        yield name.removeprefix("module."), parameter


def gathered(model: Any, **options: Any) -> Any:
    """A context in which all processes have all of the parameters of FSDP1. Those of FSDP2 are gathered one by one."""
    if not isinstance(model, FullyShardedDataParallel):
        return contextlib.nullcontext()
    return FullyShardedDataParallel.summon_full_params(model, **options)


def shared(model: Any, way: str) -> Any:
    """The model as it is trained by two processes."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "ddp compiled":
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")
    if "fsdp1" in way:
        layers = ModuleWrapPolicy({type(model.model.layers[0])})
        original = "flat" not in way
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=layers, use_orig_params=original, device_id=device)
    if "checkpointed" in way:
        model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if "bfloat16" in way else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def trained(scheme: Any, way: str) -> dict[str, Any]:
    """One step of two processes, and one step of one process."""
    whole = patched("llama_gqa", scheme).train()
    model = shared(copy.deepcopy(whole), way)
    ids = tokens(4, LENGTH)
    if "bfloat16" in way:
        whole = whole.to(torch.bfloat16)
    loss, expected, after = stepped(whole, ids)
    own, found, stepped_to = stepped(model, ids[2 * dist.get_rank() :][:2])
    losses = torch.tensor(own)
    dist.all_reduce(losses)
    assert any("position_encoding" in name for name in expected)
    # What FSDP1 makes flat has no gradients with names; the step shows them.
    share, where = (0.0, "") if way == "fsdp1 flat" else largest(found, expected)
    return {
        "loss": abs(float(losses) / 2 - loss),
        "gradients": share,
        "where": where,
        "parameters": max(float((stepped_to[name] - value).abs().max()) for name, value in after.items()),
    }


def distributed_checkpoints(folder: Path) -> dict[str, Any]:
    """What `torch.distributed.checkpoint` makes of a sharded model, in the same scheme and in another one."""
    model = shared(patched("llama_gqa", "t5"), "fsdp2")
    written = get_model_state_dict(model)
    dcp.save({"model": written}, checkpoint_id=folder / "t5")
    result: dict[str, Any] = {"marks": sum("_extra_state" in name for name in written)}
    for scheme in ("t5", "alibi"):
        into = shared(patched("llama_gqa", scheme), "fsdp2")
        with torch.no_grad():
            for weight in into.parameters():
                weight.zero_()
        state = {"model": get_model_state_dict(into)}
        try:
            dcp.load(state, checkpoint_id=folder / "t5")
            set_model_state_dict(into, state["model"])
            ids = tokens()
            result[scheme] = float((into(ids).logits - model(ids).logits).abs().max())
        except CheckpointError as error:
            touched = any(bool(full(weight).any()) for weight in into.parameters())
            result[scheme] = f"{'weights were read: ' if touched else ''}{error}"
        dist.barrier()
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        alone = patched("llama_gqa", "t5")
        alone.load_state_dict(gathered)
        result["gathered"] = distance(alone(tokens()).logits, patched("llama_gqa", "t5")(tokens()).logits)
    dist.barrier()
    return result


def patched_late(scheme: Any, way: str) -> float | str:
    """A scheme that is placed in a stock model after it was sharded or wrapped."""
    whole, stock = patched("llama_gqa", scheme), patched("llama_gqa", None)
    model = shared(stock, way)
    try:
        patch_model(stock, scheme)
        return distance(model(tokens()).logits, whole(tokens()).logits)
    except UnsupportedError as error:
        unpatch_model(stock)
        untouched = distance(model(tokens()).logits, patched("llama_gqa", None)(tokens()).logits)
        return f"{'' if untouched <= 1e-5 else 'the model was changed: '}{error}"


def main(folder: Path, *, everything: bool) -> dict[str, Any]:
    """What this process finds.

    Args:
        everything: every scheme in every way, and nothing else.
    """
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"trained": {}, "late": {}}
    for way in WAYS:
        for name in FEWER.get(way, SCHEMES) if everything else QUICK.get(way, ()):
            found["trained"][f"{way} {name}"] = trained(SCHEMES[name], way)
    if everything:
        return found
    found["checkpoints"] = distributed_checkpoints(folder)
    found["transformers"] = resaved(patched("llama_gqa", "forget_gate"), folder, fsdp_size=2)
    for way in ("fsdp1", "fsdp2", "ddp"):
        found["late"] |= {f"{way} {scheme}": patched_late(scheme, way) for scheme in ("alibi", "t5", "pope")}
    return found
