"""Stand-ins for layers and methods that only a native mechanism uses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_posenc.patching.call.placed_forward import PlacedForward


class ZeroOutput(PlacedForward):
    """Stands in for the `forward` of a linear layer.

    Args:
        module: the layer.
    """

    def __init__(self, module: nn.Linear | nn.Module) -> None:
        self.module = module

    def __call__(self, inputs: Tensor) -> Any:
        """Returns zeros `(..., out_features)`."""
        if self.retired:
            return self.stock(inputs)
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], self.module.out_features)


class UnchangedInput:
    """Stands in for a method `(hidden_states, phases)` that rotates hidden states."""

    def __call__(self, hidden_states: Tensor, *phases: Any) -> Tensor:
        """Returns `hidden_states`."""
        return hidden_states
