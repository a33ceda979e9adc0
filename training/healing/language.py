"""One cell of a study whose model predicts tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, TrainerCallback

from hf_posenc.metrics.language_modeling import LengthLosses, loss_by_length
from training.data.packing import CONCATENATE
from training.data.rows import load_rows
from training.files import read_json
from training.healing.extension import Healing
from training.healing.study import Cell
from training.language_modeling import Extension, train_language_model
from training.starting_model import load_tokenizer


class _Start(Extension):
    """Measures the model between its swap and its training."""

    def __init__(self, windows: tuple[Tensor, Tensor], lengths: list[int], causal: bool) -> None:
        self.windows, self.lengths, self.causal = windows, lengths, causal
        self.losses: LengthLosses | None = None
        self.trained = 0

    def after_scheme(self, model: Any) -> None:
        """Keeps its losses."""
        self.losses = _losses(model, self.windows, self.lengths, self.causal)

    def callbacks(self) -> list[TrainerCallback]:
        """Counts what is trained once LoRA has frozen the rest."""
        return [_Count(self)]


class _Count(TrainerCallback):
    def __init__(self, start: _Start) -> None:
        self.start = start

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start.trained = sum(p.numel() for p in kwargs["model"].parameters() if p.requires_grad)


def run_language_cell(cell: Cell) -> dict[str, Any]:
    """Swaps, trains and measures; resumes a run that was interrupted.

    Returns:
        The figures of the cell, JSON-ready.

    Raises:
        SettingsError: for a swap that cannot be made.
        TrainingError: if the training had to stop.
    """
    causal = cell.study.objective == "causal"
    given, lengths = cell.given, sorted(cell.study.lengths)
    windows = _windows(cell, causal)
    healing = Healing(cell.healing, given, causal)
    start = _Start(windows, lengths, causal)
    given.trainer.eval_on_start = True
    results = train_language_model(given, causal, [healing, start])
    folder = Path(str(given.trainer.output_dir))
    history = read_json(folder / "trainer_state.json")["log_history"]
    loader: Any = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model = loader.from_pretrained(folder, dtype=given.model.dtype)
    end = _losses(model, windows, lengths, causal)
    assert start.losses is not None
    return {
        "quantity": "loss (nats per token)",
        "swap": None if healing.swap is None else healing.swap.to_dict(),
        "trained_parameters": start.trained,
        "seconds": results["train_runtime"],
        "curve": series(history, "eval_loss"),
        "train_curve": series(history, "loss"),
        "lengths": lengths,
        "start_by_length": [row.loss for row in start.losses.rows],
        "end_by_length": [row.loss for row in end.rows],
        "reasons": sorted({row.reason for row in (*start.losses.rows, *end.rows) if row.reason is not None}),
    }


def series(history: list[dict[str, Any]], name: str) -> dict[str, list[float]]:
    """The steps that have a value, and the first value of each: a run that resumes evaluates again where it was."""
    found: dict[int, float] = {}
    for entry in history:
        if name in entry:
            found.setdefault(entry["step"], entry[name])
    return {"step": list(found), "value": list(found.values())}


def _windows(cell: Cell, causal: bool) -> tuple[Tensor, Tensor]:
    """Inputs and labels, `(windows, greatest length)`: held-out text in one piece, masked alike in every cell."""
    longest = dataclasses.replace(cell.given.data, block_size=max(cell.study.lengths), packing=CONCATENATE)
    _, rows, _ = load_rows(longest, load_tokenizer(cell.given.model, causal), causal, seed=0)
    count = min(cell.study.eval_windows, len(rows))
    chosen = [rows[index * len(rows) // count] for index in range(count)]
    return torch.stack([row["input_ids"] for row in chosen]), torch.stack([row["labels"] for row in chosen])


def _losses(model: Any, windows: tuple[Tensor, Tensor], lengths: list[int], causal: bool) -> LengthLosses:
    tail = min(32, lengths[0] // 2)
    return loss_by_length(model, *windows, lengths, causal=causal, tail=tail)
