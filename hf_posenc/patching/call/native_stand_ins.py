"""Stand-ins for layers and methods that only a native mechanism uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.call.placed_forward import PlacedForward


class ZeroOutput(PlacedForward):
    """Stands in for the `forward` of a linear layer, or of a network that ends with one."""

    def __call__(self, inputs: Tensor) -> Any:
        """Returns zeros `(..., out_features)`."""
        if self.retired:
            return self.stock(inputs)
        width = getattr(self.module, "out_features", None) or [*self.module.parameters()][-1].shape[0]
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], width)


def zero_bias_of(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for the forward of a module whose output is a bias: a zero `(1, 1, 1, 1)`, which fits any scores."""
    weight = next(module.parameters())
    return torch.zeros(1, 1, 1, 1, dtype=weight.dtype, device=weight.device)


def unrotated(heads: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for a method that rotates its first argument, and returns it unchanged."""
    return heads
