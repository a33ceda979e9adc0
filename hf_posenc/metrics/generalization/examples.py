"""Examples for training and testing, as tokens with labels only on the answer, and batches of them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.generalization.task import Example, SyntheticTask, get_task, tested_lengths
from hf_posenc.metrics.language_modeling.token_losses import IGNORED


def encode_example(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """Returns tokens of prompt, answer and end, and labels: those of answer and end, `IGNORED` elsewhere.

    Prompt and answer are tokenized separately, so that no token crosses the separator, and the answer has the same
    tokens after any prompt. If the tokenizer puts a first token before every text (`<s>`), it is included.

    Raises:
        MeasurementError: if the tokenizer has no end token, or does not know a character.
    """
    prompt = [*start_tokens(tokenizer), *_tokens(tokenizer, example.prompt)]
    answer = [*_tokens(tokenizer, example.answer), end_token(tokenizer)]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def end_token(tokenizer: Any) -> int:
    """Returns the token that ends an answer."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise MeasurementError(
        f"{type(tokenizer).__name__} has no eos_token and no sep_token, so an answer cannot end. Set "
        f"tokenizer.eos_token to the token at which the model was trained to stop."
    )


def start_tokens(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer itself puts before a text, as a list of at most one."""
    start = tokenizer.bos_token_id
    return [int(start)] if start is not None and tokenizer("a")["input_ids"][:1] == [start] else []


def padding_token(tokenizer: Any) -> int:
    """Returns the token that fills rows, masked and without a label; the end token if there is no other."""
    return end_token(tokenizer) if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def tokens_of_row(tokenizer: Any, characters: int) -> int:
    """Returns the number of tokens for this many `characters` of prompt and answer, and the tokens around them."""
    end_token(tokenizer)
    # Some tokenizers put a space before a text; prompt and answer are two texts.
    opening = len(_tokens(tokenizer, "a")) - 1
    return len(start_tokens(tokenizer)) + characters + 2 * opening + 1


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
        raise MeasurementError(
            f"{type(tokenizer).__name__} cannot encode {text!r}: it becomes {tokenizer.convert_ids_to_tokens(ids)}. "
            f"Use a tokenizer that knows single characters, such as ByT5Tokenizer()."
        )
    return ids


#: One in this many prompts is kept for testing.
HELD_OUT_SHARE = 8
_TRAIN, _TEST, _ORDER = 0, 1, 2


class SyntheticExamples(Dataset[dict[str, Tensor]]):
    """Training examples of a task, as padded rows of one length.

    Item `i` depends only on `seed` and `i`: not on the batch size, the process or what was read before. Each run of
    `len(lengths)` items, counted from 0, contains every length once, in a random order. Prompts that
    `held_out_examples` may test with never occur.

    Args:
        task: a synthetic task or its name.
        lengths: the lengths to train on; by default those of the task.
        seed: two seeds give unrelated examples.
        tokenizer: any tokenizer that knows the characters; see `encode_example`.
        size: number of items. Nothing is stored, so it may be large.
        row_length: tokens per row; by default the most that an example may take.

    Raises:
        UnknownNameError: for an unknown task.
        MeasurementError: for a length or a tokenizer that cannot be used.
    """

    def __init__(
        self,
        task: str | SyntheticTask,
        lengths: Sequence[int] | None,
        seed: int,
        tokenizer: Any,
        *,
        size: int = 1_000_000,
        row_length: int | None = None,
    ) -> None:
        self.task = get_task(task)
        self.lengths = tested_lengths(self.task, self.task.train_lengths if lengths is None else lengths)
        if size < 1:
            raise MeasurementError(f"size is {size}; a training set needs at least one item.")
        self.seed = seed
        self.tokenizer = tokenizer
        self.size = size
        longest = max(self.task.character_count(length) for length in self.lengths)
        self.row_length = tokens_of_row(tokenizer, longest) if row_length is None else row_length
        self.padding = padding_token(tokenizer)

    def __len__(self) -> int:
        return self.size

    def example(self, index: int) -> Example:
        """Returns item `index` as text."""
        index = operator.index(index)
        if not 0 <= index < self.size:
            raise IndexError(f"Item {index} of {self.size}.")
        block, place = divmod(index, len(self.lengths))
        order = np.random.default_rng([self.seed, _ORDER, block]).permutation(len(self.lengths))
        length = self.lengths[order[place]]
        generator = np.random.default_rng([self.seed, _TRAIN, index])
        while True:
            example = self.task.example(length, generator)
            if not is_held_out(self.task, length, example):
                return example

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns `input_ids`, `attention_mask` and `labels`, each `(row_length,)` int64, padded on the right."""
        example = self.example(index)
        ids, labels = encode_example(self.tokenizer, example)
        missing = self.row_length - len(ids)
        if missing < 0:
            raise MeasurementError(
                f"{example.prompt + example.answer!r} has {len(ids)} tokens, but a row has {self.row_length}. Pass "
                f"row_length={len(ids)} or more."
            )
        return {
            "input_ids": torch.tensor(ids + [self.padding] * missing),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * missing),
            "labels": torch.tensor(labels + [IGNORED] * missing),
        }


def held_out_examples(task: SyntheticTask, length: int, samples: int, seed: int) -> list[Example]:
    """Returns up to `samples` different examples of one length that no `SyntheticExamples` contains, whatever its seed.

    A length with few prompts is not split: its examples may have been trained on (see `is_split`). Fewer than `samples`
    are returned if there are no more.

    Raises:
        MeasurementError: for a length that the task does not have, or fewer than one sample.
    """
    if samples < 1:
        raise MeasurementError(f"samples is {samples}; a measurement needs at least one example.")
    task.check_length(length)
    split = is_split(task, length)
    generator = np.random.default_rng([seed, _TEST, length])
    drawn: dict[str, Example] = {}
    repeated, enough = 0, HELD_OUT_SHARE * 8
    # A small set of prompts may have fewer than are wanted. After this many draws, nearly all have been seen.
    for _ in range(samples * enough):
        example = task.example(length, generator)
        if not split or is_held_out(task, length, example):
            repeated = repeated + 1 if example.prompt in drawn else 0
            drawn.setdefault(example.prompt, example)
            if len(drawn) == samples or repeated > enough * len(drawn):
                break
    return list(drawn.values())


def is_split(task: SyntheticTask, length: int) -> bool:
    """Whether the prompts of this length are divided into some for training and some for testing.

    Of fewer than 256 prompts, all are trained on. Keeping some back would teach less and leave too few for testing.
    """
    return task.split_from is not None and length >= task.split_from


def is_held_out(task: SyntheticTask, length: int, example: Example) -> bool:
    """Whether an example is kept for testing. It depends only on the prompt, so it is the same for every seed."""
    # The digest is cryptographic, because checksums such as CRC are linear in the bits, and one task is their parity.
    return is_split(task, length) and hashlib.sha256(example.prompt.encode()).digest()[0] % HELD_OUT_SHARE == 0


class EncoderDecoderCollator:
    """Makes batches of `SyntheticExamples` for an encoder-decoder: its encoder reads prompts, its decoder answers.

    Args:
        decoder_start_token_id: the first token of the decoder; `model.config.decoder_start_token_id`.
        pad_token_id: fills rows, masked and without a label.
    """

    def __init__(self, decoder_start_token_id: int, pad_token_id: int) -> None:
        self.decoder_start_token_id = decoder_start_token_id
        self.pad_token_id = pad_token_id

    def __call__(self, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Makes a batch of items with `input_ids`, `attention_mask` and `labels`, `(row_length,)` each.

        Returns:
            `input_ids` and `attention_mask`, `(batch, longest_prompt)`, and `decoder_input_ids` and `labels`, `(batch,
            longest_answer)`. The label of a place in the decoder is the token to write there.
        """
        prompts, answers = [], []
        for item in items:
            in_answer = item["labels"] != IGNORED
            prompts.append(item["input_ids"][item["attention_mask"].bool() & ~in_answer])
            answers.append(item["labels"][in_answer])
        start = torch.tensor([self.decoder_start_token_id])
        read = [torch.cat([start, answer[:-1]]) for answer in answers]
        return {
            "input_ids": pad_sequence(prompts, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True),
            "decoder_input_ids": pad_sequence(read, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(answers, batch_first=True, padding_value=IGNORED),
        }
