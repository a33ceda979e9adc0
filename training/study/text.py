"""Text for a study: the same windows, and the same masks, for every scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from training.study.training_settings import TrainingSettings

#: The label of a token that is not a target, in PyTorch and transformers alike.
IGNORED = -100


class TrainingWindows(Dataset[dict[str, Any]]):
    """Windows of `train_length` tokens in a fixed random order, repeated (reshuffled) until `max_steps` are filled.

    Item `i` holds the tokens of a window, `(train_length,)`, and its place `i`, so that what happens to a window can
    depend on its place alone.
    """

    def __init__(self, stream: NDArray[np.int32], settings: TrainingSettings, seed: int) -> None:
        self.stream = stream
        self.length = settings.train_length
        windows = len(stream) // self.length
        wanted = settings.max_steps * settings.batch_size
        generator = np.random.default_rng([seed, 1])
        epochs = [generator.permutation(windows) for _ in range(-(-wanted // windows))]
        self.order = np.concatenate(epochs)[:wanted]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self.order[index]) * self.length
        window = torch.from_numpy(self.stream[start : start + self.length].astype(np.int64))
        return {"input_ids": window, "place": index}


def validation_windows(stream: NDArray[np.int32], settings: TrainingSettings) -> Tensor:
    """`(windows, max_length)` int64: up to `eval_windows` windows, evenly spread over the stream, not overlapping."""
    length = settings.max_length
    count = min(settings.eval_windows, len(stream) // length)
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return torch.from_numpy(np.stack([stream[start : start + length] for start in starts]).astype(np.int64))


def validation_batch(
    windows: Tensor, tokenizer: PreTrainedTokenizerBase, causal: bool, mlm_probability: float
) -> dict[str, Tensor]:
    """Inputs and targets for evaluation, each `(windows, max_length)`; the same for every seed.

    Masked: every target is shown as the mask token (no random and no unchanged tokens, as there are in training), so
    that a model that knows nothing but frequencies scores the unigram cross-entropy. Causal: the first token of a
    window has no context and is no target.
    """
    if causal:
        labels = windows.clone()
        labels[:, 0] = IGNORED
        return {"input_ids": windows, "labels": labels}
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm=True, mlm_probability=mlm_probability, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    collate.generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = dict(collate(list(windows)))
    return batch
