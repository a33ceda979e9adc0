"""What a cell is trained on, and what it is read with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerBase

from hf_posenc.metrics.generalization import SyntheticExamples, held_out_examples
from hf_posenc.metrics.generalization.encoding import encode_example, padding_token, row_length
from hf_posenc.metrics.generalization.task import SyntheticTask
from training.corpus import Corpus
from training.study.cells import Cell
from training.study.masking import MaskingCollator
from training.study.text import IGNORED, TrainingWindows, validation_batch, validation_windows

Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]


@dataclass
class CellData:
    """The data of one training.

    Args:
        train: the training set, in the order of the steps; `None` where nothing is trained.
        collate: makes a batch of its items, and of rows that have labels.
        validation: `input_ids`, `labels` and perhaps `attention_mask` for the loss while training: at the trained
            length of text, or examples of the trained lengths that training does not contain.
        windows: text to evaluate by length, `(windows, max_length)` each; `None` for a synthetic task.
        positions: of the longest sequence that is evaluated.
    """

    train: Dataset[Any] | None
    collate: Collate
    validation: dict[str, Tensor]
    windows: dict[str, Tensor] | None
    positions: int


def cell_data(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    """The data of a cell; the same for every scheme."""
    if cell.task.synthetic is None:
        return _text(cell, tokenizer)
    return _synthetic(cell, cell.task.synthetic, tokenizer)


def _text(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings = cell.settings
    train, validation = Corpus.open_streams(Path(cell.study.output_dir) / "data")
    # Read as the task says, also by a scheme that is trained longer or on longer windows: one table compares them.
    task_settings = cell.task.settings
    windows = validation_batch(
        validation_windows(validation, task_settings), tokenizer, cell.task.causal, task_settings.mlm_probability
    )
    length = task_settings.train_length
    return CellData(
        train=TrainingWindows(train, settings, cell.seed) if settings.max_steps else None,
        collate=_next_token if cell.task.causal else MaskingCollator(tokenizer, settings.mlm_probability, cell.seed),
        validation={name: tokens[:, -length:].clone() for name, tokens in windows.items()},
        windows=windows,
        positions=max(task_settings.max_length, settings.train_length),
    )


def _next_token(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    if "labels" in items[0]:
        return default_collate(items)
    windows = torch.stack([item["input_ids"] for item in items])
    return {"input_ids": windows, "labels": windows}


def _synthetic(cell: Cell, task: SyntheticTask, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings, lengths = cell.settings, cell.task.train_lengths
    longest = max(task.character_count(length) for length in {*lengths, *cell.train_lengths, *cell.task.lengths})
    size = settings.max_steps * settings.batch_size
    trained = cell.train_lengths
    return CellData(
        train=SyntheticExamples(task, trained, seed=cell.seed, tokenizer=tokenizer, size=size) if size else None,
        collate=default_collate,
        validation=_examples(task, lengths, tokenizer),
        windows=None,
        positions=row_length(tokenizer, longest),
    )


def _examples(task: SyntheticTask, lengths: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """A few examples of every trained length, as padded rows."""
    rows = [
        encode_example(tokenizer, example)
        for length in lengths
        for example in held_out_examples(task, length, samples=8, seed=0)
    ]
    longest = max(len(ids) for ids, _ in rows)
    padding = padding_token(tokenizer)
    return {
        "input_ids": torch.tensor([ids + [padding] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
    }
