"""Replacements that disable native mechanisms of attention on a grid, on one instance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.call.view import view_of


class ZeroBiasModule:
    """Stands in for the forward of a module whose output is a bias.

    Args:
        module: the module, for the device and the dtype of the result.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns a zero `(1, 1, 1, 1)`, which broadcasts against any scores."""
        weight = next(self.module.parameters())
        return torch.zeros(1, 1, 1, 1, dtype=weight.dtype, device=weight.device)


class ZeroNetwork:
    """Stands in for the forward of a network from `(..., features)` to `(..., heads)`.

    Args:
        module: the network, whose last weight has a row for each head.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, features: Tensor) -> Tensor:
        """Returns zeros `(..., heads)`."""
        heads = [*self.module.parameters()][-1].shape[0]
        return features.new_zeros(*features.shape[:-1], heads)


class Unrotated:
    """Stands in for a method that rotates one tensor."""

    def __call__(self, heads: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the tensor unchanged."""
        return heads


def with_zero_tables(module: nn.Module, names: list[str]) -> Any:
    """A view of a module that shares its attributes, except that some parameters are zero."""

    def zeros(name: str) -> property:
        return property(lambda view: torch.zeros_like(view._parameters[name]))

    return view_of(module, {name: zeros(name) for name in names})
