"""TRL's trainers around a model that was patched in memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import randomize, write_stock_llama
from tests.documentation.pages import commands
from tests.fresh import printed, run_python

trl = pytest.importorskip("trl", reason="trl is in the optional group [tools]")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402

ROWS = [
    {"prompt": "word5 word9 word12", "chosen": "word7 word8 word9 word3", "rejected": "word33 word40 word41"},
    {"prompt": "word6 word11", "chosen": "word20 word21", "rejected": "word50 word4 word51 word52 word53"},
]


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stock_llama(tmp_path_factory.mktemp("stock"))


def first_loss(model: Any, stock_folder: Path, output: Path, **options: Any) -> float:
    arguments = trl.DPOConfig(
        str(output), max_steps=1, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, report_to="none",
        save_strategy="no", bf16=False, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(stock_folder)
    trainer = trl.DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer, **options
    )
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def test_a_stock_reference_would_show(stock_folder: Path, tmp_path: Path) -> None:
    model = patch_model(AutoModelForCausalLM.from_pretrained(stock_folder), "alibi")
    stock = AutoModelForCausalLM.from_pretrained(str(model.config._name_or_path))
    assert abs(first_loss(model, stock_folder, tmp_path, ref_model=stock) - math.log(2)) > 1e-2


def test_a_scheme_that_is_trained_with_its_adapter_needs_a_reference_of_its_own(
    stock_folder: Path, tmp_path: Path
) -> None:
    """TRL's reference would be a second adapter of the same model, whose scheme is trained."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(stock_folder), "t5")
    randomize(model.position_encoding)
    reference = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
    adapted = add_lora(model, LoraConfig(task_type="CAUSAL_LM", r=2))
    with pytest.raises(UnsupportedError, match=r"'t5' are being trained.*'default' would.*'ref'.*ref_model="):
        first_loss(adapted, stock_folder, tmp_path)
    loss = first_loss(adapted, stock_folder, tmp_path, ref_model=reference)
    assert loss == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
def test_the_command_of_the_page_places_the_scheme(tmp_path: Path) -> None:
    write_stock_llama(tmp_path / "smollm2-135m")
    (tmp_path / "speeches").mkdir()
    rows = [json.dumps({"text": f"word{number} word{number + 1} word5"}) for number in range(3, 20)]
    (tmp_path / "speeches" / "train.jsonl").write_text("\n".join(rows))
    (words,) = commands("train_with_other_tools", "hf-posenc run trl")
    small = ["--max_steps=1", "--use_cpu", "--bf16=false", "--report_to=none"]
    printed(run_python("-m", "hf_posenc", "run", "trl", *words, *small, folder=tmp_path))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "sft").position_encoding.config.name == "alibi"
