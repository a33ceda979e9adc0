"""Tasks on text: predicting the next token or masked tokens, with new or pretrained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, StackDataset, default_collate
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
)

from hf_posenc.metrics.language_modeling import loss_by_length
from hf_posenc.metrics.language_modeling.by_length import default_tail
from hf_posenc.metrics.language_modeling.token_losses import causal_targets
from training.data.blocking import Batches
from training.data.text import CONCATENATE, PackedRows, RowMasking
from training.errors import SettingsError
from training.study.corpus import Corpus, unigram_cross_entropy
from training.study.settings import StudySettings, TrainingSettings
from training.study.tasks.task import CellData, StudyTask, rounded

if TYPE_CHECKING:
    from training.study.cells import Cell

#: Text with fewer tokens has no tail, and no room for tokens between the special tokens of a sentence.
_SHORTEST = 8


class TextTask(StudyTask):
    """The common base of all tasks on the text of the study."""

    reads_text = True

    @property
    def lengths(self) -> list[int]:
        return self.settings.lengths

    def train_lengths(self, settings: TrainingSettings) -> list[int]:
        return settings.train_lengths or [settings.train_length]

    def check(self, study: StudySettings) -> None:
        if min(self.lengths) < _SHORTEST and (self.settings.test_lengths or self.pretrained):
            raise SettingsError(f"Task {self.name!r}: evaluated lengths of text are at least {_SHORTEST} tokens.")


class LanguageTask(TextTask):
    """Predicting tokens of the text."""

    kind = "language_modeling"

    def data(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        return self._packed(cell, tokenizer) if self.pretrained else self._windows(cell, tokenizer)

    def _windows(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        settings, task, causal = cell.settings, self.settings, self.causal
        train, validation = Corpus.open_streams(cell.study_folder / "data")
        # Evaluated with the settings of the task, even if a scheme is trained with others, so that one table compares.
        chosen = validation_windows(validation.tokens, task)
        windows: dict[str, Any] = validation_batch(chosen, tokenizer, causal, task.mlm_probability)
        length = min(task.train_length, self.lengths[-1])
        masking = None if causal else RowMasking(tokenizer, settings.mlm_probability, cell.seed)
        return CellData(
            train=TrainingWindows(train.tokens, settings, cell.seed, masking),
            collate=default_collate,
            validation=StackDataset(**{name: tokens[:, -length:].clone() for name, tokens in windows.items()}),
            positions=max(self.lengths[-1], settings.train_length),
            windows=windows,
        )

    def _packed(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        settings, task = cell.settings, self.settings
        streams = Corpus.open_streams(cell.study_folder / "data")

        def rows(part: int, length: int) -> PackedRows:
            # Masks of the validation rows are the same for every seed.
            seed = 0 if part else cell.seed
            masking = None if self.causal else RowMasking(tokenizer, settings.mlm_probability, seed, stream=part)
            return PackedRows(streams[part], length, CONCATENATE, masking, ("training", "validation")[part] + " text")

        longest = rows(1, self.lengths[-1])
        count = min(task.eval_windows, len(longest))
        chosen = [longest[index * len(longest) // count] for index in range(count)]
        return CellData(
            train=rows(0, settings.train_length),
            collate=Batches(documents=False),
            validation=rows(1, task.train_length),
            positions=max(self.lengths[-1], settings.train_length),
            windows={name: torch.stack([row[name] for row in chosen]) for name in ("input_ids", "labels")},
        )

    def read(self, cell: Cell, model: Any, data: CellData, whole: bool = True) -> dict[str, Any]:
        assert data.windows is not None
        length, lengths = self.settings.train_length, self.lengths
        measured = loss_by_length(
            model,
            data.windows["input_ids"],
            data.windows["labels"],
            lengths,
            causal=self.causal,
            tail=self._tail_tokens,
            position_bin=max(1, length // 4) if whole else None,
            sliding_window=length if whole and length <= lengths[-1] else None,
        )
        losses = {"lengths": lengths, "loss": rounded([row.loss for row in measured.rows])}
        if not whole:
            return losses
        return losses | {
            "tail_loss": rounded([row.tail_loss for row in measured.rows]),
            "window_tail_loss": [rounded(row.window_tail_losses) for row in measured.rows],
            "sliding_loss": None if measured.sliding is None else rounded([measured.sliding.loss])[0],
            "position_edges": list(measured.position_edges),
            "position_loss": rounded(measured.position_loss),
            "reasons": sorted({row.reason for row in measured.rows if row.reason is not None}),
        }

    @property
    def _tail_tokens(self) -> int:
        """Returns the number of tokens in the tail of a window."""
        return default_tail(min(self.settings.train_length, self.lengths[0]))

    def facts(self, study: StudySettings, corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        assert corpus is not None
        windows = validation_windows(corpus.validation.tokens, self.settings)
        frequencies = unigram_cross_entropy(corpus.train.tokens, windows[:, 1:].numpy(), len(tokenizer))
        return {
            "objective": self.name,
            "tail_tokens": self._tail_tokens,
            "evaluation_tokens": windows.numel(),
            "unigram_cross_entropy": round(frequencies, 4),
        }


class CausalTask(LanguageTask):
    """Predicting the next token."""

    loader = AutoModelForCausalLM
    causal = True


class MaskedTask(LanguageTask):
    """Filling in masked tokens."""

    loader = AutoModelForMaskedLM


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """Windows of `train_length` tokens in a fixed random order, repeated (reshuffled) until `max_steps` are filled.

    Item `i` has `input_ids` and `labels`, each `(train_length,)`. With `masking`, its masks depend only on the seed and
    on `i`. So they are the same for every scheme, for any number of processes, and in a resumed run.
    """

    def __init__(
        self, stream: NDArray[np.int32], settings: TrainingSettings, seed: int, masking: RowMasking | None = None
    ) -> None:
        self.stream, self.seed, self.masking = stream, seed, masking
        self.length = settings.train_length
        windows = len(stream) // self.length
        wanted = max(settings.max_steps, 1) * settings.batch_size
        generator = np.random.default_rng([seed, 1])
        epochs = [generator.permutation(windows) for _ in range(-(-wanted // windows))]
        self.order = np.concatenate(epochs)[:wanted]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.order[index]) * self.length
        window = torch.from_numpy(self.stream[start : start + self.length].astype(np.int64))
        inputs, labels = window, window
        if self.masking is not None:
            inputs, labels = self.masking.drawn(window, self.seed * 1_000_003 + index + 1)
        return {"input_ids": inputs, "labels": labels}


def validation_windows(stream: NDArray[np.int32], settings: TrainingSettings) -> Tensor:
    """Returns up to `eval_windows` windows, spread evenly over the stream, as `(windows, longest length)` int64."""
    length = settings.lengths[-1]
    count = min(settings.eval_windows, len(stream) // length)
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return torch.from_numpy(np.stack([stream[start : start + length] for start in starts]).astype(np.int64))


def validation_batch(
    windows: Tensor, tokenizer: PreTrainedTokenizerBase, causal: bool, mlm_probability: float
) -> dict[str, Tensor]:
    """Returns inputs and targets for evaluation, each `(windows, longest length)`, the same for every seed.

    Masked: every target is replaced by the mask token (training also has random and unchanged tokens), so that a model
    that only knows frequencies gets the unigram cross-entropy. Causal: the first token of a window has no context and
    is not a target.
    """
    if causal:
        return dict(zip(("input_ids", "labels"), causal_targets(windows), strict=True))
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm=True, mlm_probability=mlm_probability, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    collate.generator = torch.Generator().manual_seed(0)
    return dict(collate(list(windows)))
