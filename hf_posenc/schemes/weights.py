"""Tables that take over a stock table, copies of initial weights, and stacked weights."""

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


def of_stacked(layers: Sequence[Any], *inputs: Any) -> Tensor:
    """What several layers compute together, by a `forward` that takes weights with an axis of layers in front."""
    result: Tensor = stacked(layers).forward(*inputs)
    return result


@torch.no_grad()
def copied_(weight: Tensor, values: Tensor) -> None:
    """Sets a weight to the values that it starts with, which are on the CPU."""
    weight.copy_(values)


class NativeTable(nn.Module):
    """Mixin of parts with one table, which takes over a stock table of the same shape."""

    weight: nn.Parameter

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table of the same shape."""
        if native.shape != self.weight.shape:
            return False
        self.weight.copy_(native)
        return True
