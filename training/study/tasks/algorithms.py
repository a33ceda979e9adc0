"""Synthetic tasks such as copying and adding. Models are tested on longer examples than they were trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import StackDataset, default_collate
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from hf_posenc.metrics.generalization import (
    SYNTHETIC_TASKS,
    EncoderDecoderCollator,
    SyntheticExamples,
    SyntheticTask,
    compare_generalization,
    held_out_examples,
)
from hf_posenc.metrics.generalization.examples import encode_example, end_token, padding_token, tokens_of_row
from training.objectives import IGNORED
from training.study.settings import TrainingSettings
from training.study.tasks.task import CellData, StudyTask, figures_of
from training.swapping import SAMPLE_ROWS

if TYPE_CHECKING:
    from training.study.cells import Cell


class AlgorithmTask(StudyTask):
    """One of `SYNTHETIC_TASKS`."""

    kind = "generalization"
    loader = AutoModelForCausalLM
    causal = True
    figures = "exact_match"

    @property
    def synthetic(self) -> SyntheticTask:
        """The synthetic task."""
        return SYNTHETIC_TASKS[self.name]

    @property
    def lengths(self) -> list[int]:
        return self.settings.test_lengths or list(self.synthetic.test_lengths)

    def train_lengths(self, settings: TrainingSettings) -> list[int]:
        return settings.train_lengths or list(self.synthetic.train_lengths)

    def identity(self, cell: Cell, digests: dict[str, str]) -> dict[str, Any]:
        return {"question seed": _question_seed(cell)}

    def data(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        task, settings, lengths = self.synthetic, cell.settings, self.train_lengths(self.settings)
        longest = max(task.character_count(length) for length in {*lengths, *cell.train_lengths, *self.lengths})
        size = max(settings.max_steps, 1) * settings.batch_size
        padding = padding_token(tokenizer)
        examples = [example for length in lengths for example in held_out_examples(task, length, samples=8, seed=0)]
        encoded = [encode_example(tokenizer, example) for example in examples]
        rows, labels = ([torch.tensor(example[part]) for example in encoded] for part in (0, 1))
        validation: dict[str, Any] = {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        }
        return CellData(
            train=SyntheticExamples(task, cell.train_lengths, seed=cell.seed, tokenizer=tokenizer, size=size),
            collate=self.collator(tokenizer),
            validation=StackDataset(**validation),
            positions=tokens_of_row(tokenizer, longest),
        )

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[Any]], dict[str, Tensor]]:
        """Returns the function that makes batches of examples."""
        return default_collate

    def read(self, cell: Cell, model: Any, data: CellData, whole: bool = True) -> dict[str, Any]:
        samples, seed, tokenizer = self.settings.test_samples, _question_seed(cell), data.train.tokenizer
        result = compare_generalization(model, tokenizer, self.synthetic, self.lengths, samples=samples, seed=seed)
        tokens = {"token_accuracy": figures_of(result, "token_accuracy")} if whole else {}
        return {"lengths": self.lengths, "accuracy": figures_of(result, "exact_match")} | tokens


class EncoderDecoderTask(AlgorithmTask):
    """A synthetic task whose prompts are read by an encoder. The encoder never reads an answer."""

    loader = AutoModelForSeq2SeqLM
    causal = False
    encoder_decoder = True

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[Any]], dict[str, Tensor]]:
        """Returns the function that makes batches of examples."""
        return EncoderDecoderCollator(end_token(tokenizer), padding_token(tokenizer))

    def sample(self, data: CellData, length: int) -> Tensor:
        return data.collate([data.train[index] for index in range(SAMPLE_ROWS)])["input_ids"]

    def try_out(self, model: Any, data: CellData) -> None:
        tokens = torch.zeros(1, data.positions, dtype=torch.int64, device=model.device)
        model(input_ids=tokens, decoder_input_ids=tokens)


def _question_seed(cell: Cell) -> int:
    """Returns a seed that gives different questions for every seed, and never those of the validation (0)."""
    return cell.seed + 1
