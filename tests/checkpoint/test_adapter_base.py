"""Which base an adapter belongs to: decided by what PEFT has not touched, whatever an adapter has done to its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_posenc import CheckpointError, patch_model
from tests.checkpoint.checkpoint_cases import randomize
from tests.checkpoint.stock_folder import write_stock_llama
from tests.checkpoint.test_adapters import adapted, base, logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, another one of the same shapes, and an adapter on the first one with ALiBi."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("base", "other", "plain")}
    write_stock_llama(made["base"])
    randomize(base(made["base"])).save_pretrained(made["other"])
    adapted(base(made["base"], "alibi"), lora()).save_pretrained(made["plain"])
    return made


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**({"target_modules": ["q_proj"], "r": 2, "task_type": "CAUSAL_LM"} | options))


def merge_and_unmerge(model: Any) -> None:
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()


def merge(model: Any) -> None:
    model.merge_adapter()


def nothing(model: Any) -> None:
    pass


CONFIGS: dict[str, Callable[[], Any]] = {
    "q_proj": lora,
    "all linear": lambda: lora(target_modules="all-linear"),
    "everything": lambda: lora(target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
    "dora": lambda: lora(use_dora=True),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "olora": lambda: lora(init_lora_weights="olora"),
    "biases": lambda: lora(bias="all"),
    "embeddings saved": lambda: lora(modules_to_save=["embed_tokens"]),
    "a layer saved": lambda: lora(modules_to_save=["mlp"]),
    "norms saved": lambda: lora(modules_to_save=["norm"]),
    "embeddings adapted": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "trainable tokens": lambda: lora(trainable_token_indices=[4, 5]),
    "target parameters": lambda: lora(target_parameters=["up_proj.weight"]),
    "replicated": lambda: lora(layer_replication=[[0, 2], [0, 2]]),
    "replicated backwards": lambda: lora(layer_replication=[[1, 2], [0, 2]]),
    "norm tuning": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "boft": lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4, task_type="CAUSAL_LM"),
}
LIVES: dict[str, Callable[[Any], None]] = {"new": nothing, "merged": merge, "cycled": merge_and_unmerge}


#: What PEFT does not load, or not beside LoRA, with stock models either.
NOT_MERGED = ("embeddings adapted", "replicated", "replicated backwards", "norm tuning")
ALONE = ("trainable tokens", "norm tuning", "boft")


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_adapter_fits_its_base_and_no_other(
    config: str, life: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = adapted(base(folders["base"], "alibi"), CONFIGS[config]())
    expected = logits(model)
    LIVES[life](model)
    model.save_pretrained(tmp_path)
    found = PeftModel.from_pretrained(base(folders["base"]), tmp_path)
    if life == "new" or config not in NOT_MERGED:
        # Merged, the products are added in another order; PiSSA and OLoRA decompose again.
        torch.testing.assert_close(logits(found), expected, rtol=0, atol=1e-3)
    for scheme in (None, "alibi"):
        with pytest.raises(CheckpointError, match="other weights"):
            PeftModel.from_pretrained(base(folders["other"], scheme), tmp_path)
    if config in ALONE:
        return
    LIVES[life](found)
    found.load_adapter(folders["plain"], "second")
    stranger = adapted(base(folders["other"], "alibi"), CONFIGS[config]())
    LIVES[life](stranger)
    with pytest.raises(CheckpointError, match="other weights"):
        stranger.load_adapter(folders["plain"], "second")


def test_unloaded_it_is_the_base_again(folders: dict[str, Path]) -> None:
    model = PeftModel.from_pretrained(base(folders["base"]), folders["plain"])
    merge_and_unmerge(model)
    PeftModel.from_pretrained(model.unload(), folders["plain"])
    with pytest.raises(CheckpointError, match="other weights"):
        PeftModel.from_pretrained(model.merge_and_unload(), folders["plain"])


def test_a_weight_that_is_trained_outside_of_the_adapter_belongs_to_the_base(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = get_peft_model(base(folders["base"], "alibi"), lora())
    model.get_input_embeddings().weight.requires_grad_(True).data.add_(0.1)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        PeftModel.from_pretrained(base(folders["base"]), tmp_path)


@pytest.mark.parametrize("config", ["q_proj", "pissa", "everything", "replicated"])
def test_patched_after_the_adapter_was_made(config: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = patch_model(adapted(base(folders["base"]), CONFIGS[config]()), "alibi")
    merge_and_unmerge(model)
    model.save_pretrained(tmp_path)
    found = PeftModel.from_pretrained(base(folders["base"]), tmp_path)
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-3)
    if config != "everything":  # Only norms of ones are left.
        with pytest.raises(CheckpointError, match="other weights"):
            PeftModel.from_pretrained(base(folders["other"]), tmp_path)


def test_a_base_in_half_precision(folders: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(base(folders["base"], "alibi", dtype=torch.bfloat16), lora())
    merge_and_unmerge(model)
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        PeftModel.from_pretrained(base(folders["base"], dtype=dtype), tmp_path).load_adapter(folders["plain"], "second")
