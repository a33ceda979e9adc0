"""One of two processes that train a model whose weights DeepSpeed has partitioned (ZeRO-3), beside one process."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_posenc import UnsupportedError, native_scheme, unpatch_model
from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.schemes import list_schemes
from tests.distributed.sharded_worker import LEARNING_RATE, LENGTH, SCHEMES, stepped
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import patched, placed, tokens

#: No weight is small enough to stay whole.
CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
#: A model with rotations, one with a table, one that is bidirectional, and one with biases.
QUICK = {
    "llama_gqa": ("t5", "forget_gate", "learned"),
    "gpt2": ("fire", "learned"),
    "bert": ("t5",),
}


@contextmanager
def partitioning() -> Iterator[None]:
    """Context manager in which transformers partitions the models that it builds."""
    config = HfDeepSpeedConfig(CONFIG)
    yield
    unset_hf_deepspeed_config()
    del config


def in_engine(model: Any) -> Any:
    """An engine that trains a model by SGD."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def weights_of(model: Any) -> dict[str, Tensor]:
    """The whole weights, by name."""
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def step_of_two(model: Any, expected: tuple[float, dict[str, Tensor], dict[str, Tensor]]) -> float:
    """How far a step of two processes, with half of a batch each, is from the step of one."""
    loss, _, stepped_to = expected
    engine = in_engine(model)
    ids = tokens(4, LENGTH)[2 * dist.get_rank() :][:2]
    own = engine(input_ids=ids, labels=ids).loss
    engine.backward(own)
    engine.step()
    losses = own.detach().clone()
    dist.all_reduce(losses)
    after = weights_of(model)
    farthest = max(float((after[name] - value).abs().max()) for name, value in stepped_to.items())
    return max(abs(float(losses) / 2 - loss), farthest)


def trained(architecture: str, scheme: Any, folder: Path) -> dict[str, Any]:
    """Steps of a model that is patched when its weights are partitioned, and of one that is loaded with its scheme."""
    stock = ARCHITECTURES[architecture].build()
    whole = placed(ARCHITECTURES[architecture].build(), scheme).train()
    if dist.get_rank() == 0:
        stock.save_pretrained(folder / "stock")
        whole.save_pretrained(folder / "patched")
    dist.barrier()
    expected = stepped(whole, tokens(4, LENGTH))
    with partitioning():
        late = type(stock).from_pretrained(folder / "stock").train()
        empty = not any(weight.numel() for weight in late.parameters())
        native = native_scheme(late) == native_scheme(stock)
        found = {"patched": step_of_two(placed(late, scheme), expected), "native": native, "empty": empty}
        loaded = type(stock).from_pretrained(folder / "patched").train()
        found["loaded"] = step_of_two(loaded, expected)
    dist.barrier()
    shutil.rmtree(folder / "patched", ignore_errors=True)
    dist.barrier()
    return found


def refused(folder: Path) -> dict[str, Any]:
    """What the calls say that are refused, and what is left of a model that was patched and is not any more."""
    if dist.get_rank() == 0:
        patched("llama_gqa", "t5").save_pretrained(folder / "t5")
        patched("llama_gqa", "alibi").save_pretrained(folder / "other")
        patched("llama_gqa", None).save_pretrained(folder / "stock")
        for name in ("stock", "other"):
            shutil.copytree(folder / "t5", folder / f"t5_in_{name}")
            shutil.copy(folder / name / "config.json", folder / f"t5_in_{name}")
    dist.barrier()
    kind, found = type(ARCHITECTURES["llama_gqa"].build()), {}
    with partitioning():
        for name in ("stock", "other"):
            try:
                kind.from_pretrained(folder / f"t5_in_{name}")
            except CheckpointError as error:
                found[name] = str(error)
        model = kind.from_pretrained(folder / "stock")
        before = weights_of(model)
        unpatch_model(placed(model, "t5"))
        after = weights_of(model)
        found["undone"] = before.keys() == after.keys() and all(map(torch.equal, before.values(), after.values()))
        built = kind._from_config(AutoConfig.from_pretrained(folder / "t5"))
        found["built"] = float(next(built.position_encoding.parameters()).std())
        engine = in_engine(model)
        placed(engine.module, "alibi")
        try:
            placed(engine.module, "t5")
        except UnsupportedError as error:
            found["late"] = str(error)
    return found


def main(folder: Path, *, everything: bool) -> dict[str, Any]:
    """What this process finds.

    Args:
        everything: every scheme in a Llama and a GPT-2, and nothing else.
    """
    warnings.simplefilter("ignore")
    schemes = {name: name for name in list_schemes()} | SCHEMES
    cases = dict.fromkeys(("llama_gqa", "gpt2"), tuple(schemes)) if everything else QUICK
    found: dict[str, Any] = {
        f"{architecture} {name}": trained(architecture, schemes[name], folder)
        for architecture, names in cases.items()
        for name in names
    }
    return {"trained": found} if everything else {"trained": found, "refused": refused(folder)}
