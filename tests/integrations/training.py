"""Training loops of other libraries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.checkpoint.checkpoint_cases import randomize
from tests.integrations.subject import assert_close, folder, llama, saved, text, tokenizer, tokens
from tests.integrations.tool import Tool

_LENGTHS = (7, 12, 9, 5)


def _documents() -> list[torch.Tensor]:
    return [tokens(1, length, seed=length)[0] for length in _LENGTHS]


def _loss(model: Any, documents: list[torch.Tensor]) -> float:
    """Mean over all targets of documents that are run one by one."""
    losses = []
    with torch.no_grad():
        for ids in documents:
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
            losses.append(functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
    return float(torch.cat(losses).mean())


def _same_loss(found: float, expected: float) -> None:
    # Loss values of about 5 in float32, averaged in another order.
    assert math.isclose(found, expected, rel_tol=1e-4), f"loss {found}, expected {expected}"


def _quiet(path: Path, **settings: Any) -> dict[str, Any]:
    return {
        "output_dir": str(path),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "seed": 0,
    } | settings


def _rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens(8, 12, seed=3)]


def _trainer(scheme: Any) -> None:
    """Three steps of Trainer against the same steps by hand."""
    from transformers import Trainer, TrainingArguments

    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    model, twin = llama(scheme), llama(scheme)
    with folder() as path:
        arguments = TrainingArguments(**_quiet(path, max_steps=3, per_device_train_batch_size=8, learning_rate=0.05))
        Trainer(model, arguments, train_dataset=_rows(), optimizers=(optimizer(model), None)).train()
    by_hand, batch = optimizer(twin), torch.stack([row["input_ids"] for row in _rows()])
    twin.train()
    for _ in range(3):
        twin(input_ids=batch, labels=batch).loss.backward()
        by_hand.step()
        by_hand.zero_grad()
    probe = tokens(2, 12, seed=9)
    with torch.no_grad():
        assert_close(model.eval()(probe).logits, twin.eval()(probe).logits, 1e-3)


def _trainer_resumes(scheme: Any) -> None:
    """Four steps in two runs against four in one."""
    from transformers import Trainer, TrainingArguments

    def run(path: Path, model: Any, **resume: Any) -> Any:
        steps = _quiet(path, max_steps=4, save_strategy="steps", save_steps=2, save_only_model=False)
        Trainer(model, TrainingArguments(**steps), train_dataset=_rows()).train(**resume)
        return model.eval()

    probe = tokens(2, 12, seed=9)
    with folder() as path:
        whole = run(path, llama(scheme))
        resumed = run(path, llama(scheme), resume_from_checkpoint=str(path / "checkpoint-2"))
    with torch.no_grad():
        assert_close(resumed(probe).logits, whole(probe).logits)


def _accelerate(scheme: Any) -> None:
    """Two micro-batches accumulated by accelerate against one batch."""
    from accelerate import Accelerator

    model, twin, batch = llama(scheme), llama(scheme), tokens(4, 12, seed=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.05))
    for half in batch.chunk(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(input_ids=half, labels=half).loss)
            optimizer.step()
            optimizer.zero_grad()
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.05)
    twin.train()(input_ids=batch, labels=batch).loss.backward()
    by_hand.step()
    with torch.no_grad():
        assert_close(accelerator.unwrap_model(prepared).eval()(batch).logits, twin.eval()(batch).logits, 1e-3)


def _dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [ids.tolist() for ids in _documents()]})


def _supervised(lora: bool = False, **settings: Any) -> Any:
    """Each document is one sequence. Wrapped packing cuts them wherever a row ends, and a row is one sequence."""

    def check(scheme: Any) -> None:
        from trl import SFTConfig, SFTTrainer

        model, adapter = llama(scheme), None
        if lora:
            from peft import LoraConfig

            adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        with folder() as path:
            arguments = SFTConfig(**_quiet(path, max_steps=1, max_length=64, bf16=False, loss_type="nll") | settings)
            expected = _loss(model, _documents())
            trainer = SFTTrainer(
                model, args=arguments, train_dataset=_dataset(), processing_class=tokenizer(), peft_config=adapter
            )
            if settings.get("packing_strategy") == "wrapped":
                expected = _loss(model, [torch.tensor(row) for row in trainer.train_dataset["input_ids"]])
            trainer.train()
        _same_loss(trainer.state.log_history[0]["loss"], expected)

    return check


def _preferences(lora: bool) -> Any:
    def check(scheme: Any) -> None:
        """The policy and its reference are the same model before the first step."""
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM
        from trl import DPOConfig, DPOTrainer

        import hf_posenc

        texts = [text(ids) for ids in _documents()]
        data = Dataset.from_dict({
            "prompt": [words[: len(words) // 2] for words in texts],
            "chosen": [" w7 w8 w9"] * 4,
            "rejected": [" w40 w41"] * 4,
        })  # fmt: skip
        with saved(llama(None)) as source, folder() as path:
            model = hf_posenc.patch_model(AutoModelForCausalLM.from_pretrained(source), scheme)
            randomize(model.position_encoding)
            adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None
            arguments = DPOConfig(**_quiet(path, max_steps=1, bf16=False, max_length=64))
            trainer = DPOTrainer(
                model, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapter
            )
            trainer.train()
        _same_loss(trainer.state.log_history[0]["loss"], math.log(2.0))

    return check


TOOLS = [
    Tool("Training", "Trainer", _trainer, "the same three steps by hand"),
    Tool("Training", "Trainer, stopped and resumed", _trainer_resumes, "the same steps in one run"),
    Tool("Training", "accelerate, gradient accumulation", _accelerate, "one step on the whole batch"),
    Tool("Training", "TRL SFT", _supervised(), "loss of documents one by one", ("trl",)),
    Tool("Training", "TRL SFT, packed (bfd)", _supervised(packing=True, packing_strategy="bfd"),
         "loss of documents one by one", ("trl",)),
    Tool("Training", "TRL SFT, padding-free", _supervised(padding_free=True, max_length=None),
         "loss of documents one by one", ("trl",)),
    Tool("Training", "TRL SFT, packed (wrapped)",
         _supervised(packing=True, packing_strategy="wrapped", max_length=12, dataloader_drop_last=False),
         "loss of the packed rows one by one", ("trl",)),
    Tool("Training", "TRL SFT with LoRA", _supervised(lora=True), "loss of documents one by one", ("trl", "peft")),
    Tool("Training", "TRL DPO, model patched in memory", _preferences(lora=False), "log 2: policy = reference",
         ("trl",)),
    Tool("Training", "TRL DPO with LoRA", _preferences(lora=True), "log 2: policy = reference", ("trl", "peft")),
]  # fmt: skip
