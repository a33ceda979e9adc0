"""Tools that look at the config or the class of a model, on patched and on reloaded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from tests.checkpoint.checkpoint_cases import VOCABULARY, bert, llama, outputs, randomize


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return randomize(hf_posenc.patch_model(llama(), "t5"))


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    words = {f"w{i}": i for i in range(VOCABULARY - 3)} | {"<pad>": VOCABULARY - 3, "<s>": VOCABULARY - 2}
    words["<unk>"] = VOCABULARY - 1
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", bos_token="<s>")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_auto_tokenizer_and_pipeline(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w3 w5")["input_ids"] == [3, 5]
    generator = pipeline("text-generation", model=str(folder))
    assert type(generator.model) is LlamaForCausalLM
    (answer,) = generator("w3 w5 w7", max_new_tokens=4, do_sample=False)
    assert answer["generated_text"].startswith("w3 w5 w7")
    assert answer["generated_text"].count("w") == 7


def test_peft_finds_its_default_targets_and_comes_back(model: Any, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

    stock_targets = set(get_peft_model(llama(), LoraConfig()).peft_config["default"].target_modules)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for base in (model, loaded):
        lora = get_peft_model(base, LoraConfig(init_lora_weights=False))
        assert set(lora.peft_config["default"].target_modules) == stock_targets
    expected = outputs(lora.eval())
    lora.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    assert torch.equal(outputs(again), expected)
    for load in (AutoPeftModelForCausalLM, AutoModelForCausalLM, LlamaForCausalLM):
        assert torch.equal(outputs(load.from_pretrained(tmp_path / "adapter").eval()), expected)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), outputs(merged))


@pytest.mark.parametrize("build", [llama, bert])
def test_trainer_checkpoints_resume_and_load(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCABULARY, (16, 12))]

    def trainer(model: PreTrainedModel, steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
        )
        return Trainer(model=model, args=arguments, train_dataset=data)

    model = hf_posenc.patch_model(build(), "t5")
    before = {name: value.clone() for name, value in model.named_parameters() if "position_encoding" in name}
    assert before
    trainer(model, 2).train()
    for name, value in model.named_parameters():
        if name in before:
            assert not torch.equal(value, before[name]), "the scheme was not trained"
    loaded = type(model).from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert torch.equal(outputs(loaded), outputs(model.eval()))
    resumed = hf_posenc.patch_model(build(), "t5")
    trainer(resumed, 4).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    again = type(model).from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert torch.equal(outputs(again), outputs(resumed.eval()))
