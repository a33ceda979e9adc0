"""The same batches, and the same masks, for every scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from training.settings import CompareSettings

#: The label of a token that is not a target, in PyTorch and transformers alike.
IGNORED = -100


class TrainingWindows(Dataset[tuple[int, Tensor]]):
    """Windows of `train_length` tokens in a fixed random order, repeated (reshuffled) until `max_steps` are filled.

    Item `i` is `(i, tokens)`, so that what happens to a window can depend on its place alone.
    """

    def __init__(self, stream: NDArray[np.int32], settings: CompareSettings) -> None:
        self.stream = stream
        self.length = settings.train_length
        windows = len(stream) // self.length
        wanted = settings.max_steps * settings.batch_size
        generator = np.random.default_rng([settings.seed, 1])
        epochs = [generator.permutation(windows) for _ in range(-(-wanted // windows))]
        self.order = np.concatenate(epochs)[:wanted]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        start = int(self.order[index]) * self.length
        return index, torch.from_numpy(self.stream[start : start + self.length].astype(np.int64))


class Collator:
    """Inputs and labels of a batch; masks depend on the seed and on the place in the order, on nothing else.

    The masks of a step are therefore the same for every scheme, and the same again after a run was resumed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: str, settings: CompareSettings) -> None:
        self.seed = settings.seed
        self.masked = task == "masked"
        self.collate = DataCollatorForLanguageModeling(
            tokenizer, mlm=self.masked, mlm_probability=settings.mlm_probability
        )
        self.collate.generator = torch.Generator()

    def __call__(self, items: list[tuple[int, Tensor]]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each `(batch, length)`."""
        if not self.masked:
            windows = torch.stack([window for _, window in items])
            return {"input_ids": windows, "labels": windows}
        first = items[0][0]
        self.collate.generator.manual_seed(self.seed * 1_000_003 + first + 1)
        batch: dict[str, Tensor] = dict(self.collate([window for _, window in items]))
        return batch


def validation_windows(stream: NDArray[np.int32], settings: CompareSettings) -> Tensor:
    """`(windows, max_length)` int64: up to `eval_windows` windows, evenly spread over the stream, not overlapping."""
    length = settings.max_length
    count = min(settings.eval_windows, len(stream) // length)
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return torch.from_numpy(np.stack([stream[start : start + length] for start in starts]).astype(np.int64))


def validation_batch(
    windows: Tensor, tokenizer: PreTrainedTokenizerBase, task: str, settings: CompareSettings
) -> dict[str, Tensor]:
    """Inputs and targets for evaluation, each `(windows, max_length)`.

    Masked: every target is shown as the mask token (no random and no unchanged tokens, as there are in training), so
    that a model that knows nothing but frequencies scores the unigram cross-entropy. Causal: the first token of a
    window has no context and is no target.
    """
    if task == "causal":
        labels = windows.clone()
        labels[:, 0] = IGNORED
        return {"input_ids": windows, "labels": labels}
    collate = DataCollatorForLanguageModeling(
        tokenizer,
        mlm=True,
        mlm_probability=settings.mlm_probability,
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
    )
    collate.generator = torch.Generator().manual_seed(settings.seed)
    batch: dict[str, Any] = dict(collate(list(windows)))
    return batch
