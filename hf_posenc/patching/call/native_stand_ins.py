"""Stand-ins for layers and methods that only a native mechanism uses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_posenc.patching.call.placed_forward import PlacedForward


class ZeroOutput(PlacedForward):
    """Stands in for the `forward` of a linear layer, or of a network that ends with one."""

    def __call__(self, inputs: Tensor) -> Any:
        """Returns zeros `(..., out_features)`."""
        if self.retired:
            return self.stock(inputs)
        width = getattr(self.module, "out_features", None) or [*self.module.parameters()][-1].shape[0]
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], width)


def unrotated(heads: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for a method that rotates its first argument, and returns it unchanged."""
    return heads
