"""A factor of all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.schemes.parts import LogitScale, Positions


class ConstantScale(LogitScale):
    """The same factor for every query, such as `1 / sqrt(2)` where two products are summed instead of one.

    Args:
        factor: of all logits.
    """

    reads_positions = False
    factor_of_all = property(lambda self: self.factor)

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, 1, length)` in float32."""
        ids = positions.ids
        return torch.full(ids.shape, self.factor, dtype=torch.float32, device=ids.device).unsqueeze(1)
