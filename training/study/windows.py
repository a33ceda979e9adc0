"""Windows of text for new weights: the same windows, and the same masks, for every scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from training.objectives import IGNORED
from training.study.training_settings import TrainingSettings


class TrainingWindows(Dataset[dict[str, Any]]):
    """Windows of `train_length` tokens in a fixed random order, repeated (reshuffled) until `max_steps` are filled.

    Item `i` holds the tokens of a window, `(train_length,)`, and its place `i`, so that what happens to a window can
    depend on its place alone.
    """

    def __init__(self, stream: NDArray[np.int32], settings: TrainingSettings, seed: int) -> None:
        self.stream = stream
        self.length = settings.train_length
        windows = len(stream) // self.length
        wanted = max(settings.max_steps, 1) * settings.batch_size
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


def next_token(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """`input_ids` and `labels` of windows, each `(batch, length)`; rows that have labels stay as they are."""
    if "labels" in items[0]:
        return default_collate(items)
    windows = torch.stack([item["input_ids"] for item in items])
    return {"input_ids": windows, "labels": windows}


class MaskingCollator:
    """Masks each window by the seed and its place in the order, and by nothing else.

    The masks are therefore the same for every scheme, on any number of processes, and after a run was resumed.

    Args:
        tokenizer: whose mask token is shown.
        mlm_probability: share of the tokens that become targets.
        seed: of the masks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int) -> None:
        self.seed = seed
        self.mask = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=mlm_probability)
        self.mask.generator = torch.Generator()

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each `(batch, length)`; rows that have labels are masked already."""
        if "labels" in items[0]:
            return default_collate(items)
        rows = [self._masked(item["input_ids"], item["place"]) for item in items]
        return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels")}

    def _masked(self, window: Tensor, place: int) -> dict[str, Tensor]:
        self.mask.generator.manual_seed(self.seed * 1_000_003 + place + 1)
        masked: dict[str, Tensor] = dict(self.mask([window]))
        return masked


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of tensors that share their first dimension."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.tensors.items()}
