"""Tensors as a dataset of rows."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of tensors that share their first dimension."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.tensors.items()}
