"""A tiny model with dropout, rows that differ by epoch, and a Trainer over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from hf_posenc import patch_model
from training.data.order import EpochRow, RowsByEpoch
from training.objectives import IGNORED
from training.trainer import SchemeTrainer

VOCABULARY, LENGTH = 32, 8


class Rows(RowsByEpoch):
    """Random tokens; which of them are targets differs by epoch and by row, and so does their number."""

    def __init__(self, rows: int, causal: bool) -> None:
        self.tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
        self.causal = causal

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | EpochRow) -> dict[str, Any]:
        epoch, row = index if isinstance(index, tuple) else (0, index)
        tokens = self.tokens[row]
        kept = torch.rand(LENGTH, generator=torch.Generator().manual_seed(1000 * epoch + row)) < (row % 4 + 1) / 5
        kept[0] = kept[0] and not self.causal
        return {"input_ids": tokens, "labels": torch.where(kept, tokens, IGNORED)}


def tiny(causal: bool = True, dropout: float = 0.1, scheme: str | None = "kerple") -> Any:
    """A patched Llama with attention dropout, or a patched BERT."""
    set_seed(1)
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 64,
    }  # fmt: skip
    if causal:
        model: Any = LlamaForCausalLM(LlamaConfig(**common, attention_dropout=dropout))
    else:
        model = BertForMaskedLM(BertConfig(**common, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))
    return model if scheme is None else patch_model(model, scheme)


def trainer(folder: Path, causal: bool = True, model: Any = None, **options: Any) -> SchemeTrainer:
    """A Trainer that writes below `folder`."""
    constructor = {name: options.pop(name) for name in ("callbacks", "loss_hooks", "train_dataset") if name in options}
    arguments = TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 2,
            "max_steps": 8,
            "learning_rate": 1e-2,
            "logging_steps": 3,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            **options,
        },
    )
    made = SchemeTrainer(
        model=tiny(causal) if model is None else model,
        args=arguments,
        causal=causal,
        **{"train_dataset": Rows(11, causal), "eval_dataset": Rows(5, causal), **constructor},
    )
    made.remove_callback(PrinterCallback)
    return made


def curve(made: SchemeTrainer) -> list[dict[str, float]]:
    """What was logged."""
    return without_clocks(made.state.log_history)


def without_clocks(history: list[dict[str, float]]) -> list[dict[str, float]]:
    clocks = ("runtime", "per_second")
    return [{name: value for name, value in entry.items() if not name.endswith(clocks)} for entry in history]
