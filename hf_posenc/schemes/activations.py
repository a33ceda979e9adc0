"""Functions that several schemes apply to numbers of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def softplus(numbers: Tensor) -> Tensor:
    """`log(1 + exp(numbers))`. In a graph, torch expects another layout of its gradient than the operator returns."""
    if torch.compiler.is_compiling():
        return -nn.functional.logsigmoid(-numbers)
    return nn.functional.softplus(numbers)
