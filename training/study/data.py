"""What a cell is trained on, and what it is read with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerBase

from hf_posenc.metrics.generalization import SyntheticExamples, held_out_examples
from hf_posenc.metrics.generalization.encoding import encode_example, padding_token, row_length
from hf_posenc.metrics.generalization.task import SyntheticTask
from training.data.blocking import Batches
from training.data.masking import RowMasking
from training.data.packing import CONCATENATE, PackedRows
from training.objectives import IGNORED
from training.study.cells import Cell
from training.study.corpus import Corpus
from training.study.embedding import TeacherBatches, Texts
from training.study.windows import (
    MaskingCollator,
    Rows,
    TrainingWindows,
    next_token,
    validation_batch,
    validation_windows,
)

Collate = Callable[[list[Any]], dict[str, Tensor]]


@dataclass
class CellData:
    """The data of one training.

    Args:
        train: the training set, also of a cell that is only read: a start may be fitted on it.
        collate: makes a batch of its items, and of those of `validation`.
        validation: for the points of the curve: text of the trained length, or examples of the trained lengths that
            training does not contain.
        windows: text to evaluate by length, `input_ids` and `labels`, `(windows, max_length)` each; `None` for a
            synthetic task and for embeddings.
        positions: of the longest sequence that is evaluated.
    """

    train: Any
    collate: Collate
    validation: Any
    windows: dict[str, Tensor] | None
    positions: int


def cell_data(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    """The data of a cell; the same for every scheme.

    Raises:
        SettingsError: for text that does not fill one row.
    """
    if cell.task.synthetic is not None:
        return _synthetic(cell, cell.task.synthetic, tokenizer)
    if cell.task.kind == "embedding":
        return _embedding(cell, tokenizer)
    return _packed(cell, tokenizer) if cell.task.pretrained else _windows(cell, tokenizer)


def _windows(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    """Text for new weights."""
    settings = cell.settings
    train, validation = Corpus.open_streams(cell.study_folder / "data")
    # Read as the task says, also by a scheme that is trained longer or on longer windows: one table compares them.
    task_settings = cell.task.settings
    windows = validation_batch(
        validation_windows(validation.tokens(), task_settings),
        tokenizer,
        cell.task.causal,
        task_settings.mlm_probability,
    )
    length = min(task_settings.train_length, task_settings.max_length)
    return CellData(
        train=TrainingWindows(train.tokens(), settings, cell.seed),
        collate=next_token if cell.task.causal else MaskingCollator(tokenizer, settings.mlm_probability, cell.seed),
        validation=Rows({name: tokens[:, -length:].clone() for name, tokens in windows.items()}),
        windows=windows,
        positions=max(task_settings.max_length, settings.train_length),
    )


def _packed(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    """Text for a pretrained model, in the rows of `run_clm.py` and `run_mlm.py`."""
    settings, task_settings = cell.settings, cell.task.settings
    streams = Corpus.open_streams(cell.study_folder / "data")

    def rows(part: int, length: int) -> PackedRows:
        # Masks of the validation rows are the same for every seed.
        seed = 0 if part else cell.seed
        masking = None if cell.task.causal else RowMasking(tokenizer, settings.mlm_probability, seed, stream=part)
        return PackedRows(streams[part], length, CONCATENATE, masking, ("training", "validation")[part] + " text")

    longest = rows(1, task_settings.max_length)
    count = min(task_settings.eval_windows, len(longest))
    chosen = [longest[index * len(longest) // count] for index in range(count)]
    return CellData(
        train=rows(0, settings.train_length),
        collate=Batches(None),
        validation=rows(1, task_settings.train_length),
        windows={name: torch.stack([row[name] for row in chosen]) for name in ("input_ids", "labels")},
        positions=max(task_settings.max_length, settings.train_length),
    )


def _embedding(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings = cell.settings
    train, validation = (Texts(stream, tokenizer) for stream in Corpus.open_streams(cell.study_folder / "data"))
    return CellData(
        train=TeacherBatches(
            train,
            cell.train_lengths,
            tokens=settings.batch_size * settings.train_length,
            steps=settings.max_steps,
            seed=cell.seed,
        ),
        collate=_only,
        validation=validation,
        windows=None,
        positions=max(cell.train_lengths),
    )


def _only(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return batches[0]


def _synthetic(cell: Cell, task: SyntheticTask, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings, lengths = cell.settings, cell.task.train_lengths(cell.task.settings)
    longest = max(task.character_count(length) for length in {*lengths, *cell.train_lengths, *cell.task.lengths})
    size = max(settings.max_steps, 1) * settings.batch_size
    return CellData(
        train=SyntheticExamples(task, cell.train_lengths, seed=cell.seed, tokenizer=tokenizer, size=size),
        collate=default_collate,
        validation=Rows(_examples(task, lengths, tokenizer)),
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
