"""Learned weights that start from a normal distribution, and tables that take over a stock table."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NormalWeights(nn.Module):
    """Mixin of parts whose own parameters are all drawn from one normal distribution."""

    #: Standard deviation of new entries.
    initializer_range: float

    def reset_parameters(self) -> None:
        """Draws every entry from N(0, initializer_range)."""
        for weight in self.parameters(recurse=False):
            nn.init.normal_(weight, std=self.initializer_range)


class NativeTable(NormalWeights):
    """Mixin of parts with one table, which takes over a stock table of the same shape."""

    weight: nn.Parameter

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table of the same shape."""
        if native.shape != self.weight.shape:
            return False
        self.weight.copy_(native)
        return True
