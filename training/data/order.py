"""The order in which rows are read. It depends only on the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from training.errors import SettingsError

#: A row as a sampler asks for it: epoch and number.
EpochRow = tuple[int, int]


class RowsByEpoch(Dataset[dict[str, Any]]):
    """A dataset whose items are indexed by `(epoch, row)`, so that the random draws for a row can differ by epoch.

    A plain row number means epoch 0, for evaluation.
    """

    def __len__(self) -> int:
        raise NotImplementedError


class EpochOrder(Sampler[EpochRow]):
    """A new permutation of all rows in each epoch, cut to whole batches.

    An epoch does not end with a short batch, so one process reads the same batches as several processes together. The
    rows that are left over differ by epoch.

    Args:
        rows: number of rows.
        multiple: number of rows in a batch, over all processes and accumulated batches.
        seed: seed of the permutations.
        shuffle: whether to permute the rows.
    """

    def __init__(self, rows: int, multiple: int, seed: int, shuffle: bool = True) -> None:
        if rows < multiple:
            raise SettingsError(
                f"The training data fills {rows} rows, but one update needs {multiple} "
                "(per_device_train_batch_size x gradient_accumulation_steps x processes). Use more data, a shorter "
                "--block_size for text, or smaller batches."
            )
        self.rows, self.multiple, self.seed, self.shuffle = rows, multiple, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Selects the permutation of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows - self.rows % self.multiple

    def __iter__(self) -> Iterator[EpochRow]:
        epoch = self.epoch
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows) if self.shuffle else range(self.rows)
        return ((epoch, int(row)) for row in order[: len(self)])
