"""Learned weights that start from a normal distribution, tables that take over a stock table, and stacked weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def stacked(layers: Sequence[Any]) -> Any:
    """A copy of the first of several parts of one class whose weights are those of all, `(layers, ...)`.

    Gradients flow back to the parts. Each of them has an entry in the copy even if it is the only one.
    """
    made = copy.copy(layers[0])
    state: dict[str, Any] = dict(made.__dict__)
    made.__dict__ = state
    state["_parameters"] = {name: torch.stack([one._parameters[name] for one in layers]) for name in made._parameters}
    state["_modules"] = {name: stacked([one._modules[name] for one in layers]) for name in made._modules}
    return made


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
