"""What gives the weights of a tiny Whisper an effect, and its inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def normal(*shape: int) -> Tensor:
    """Fixed random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def stir(model: nn.Module) -> None:
    """Gives all weights an effect: constants become random, and attention is not uniform."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and not parameter.requires_grad and parameter.std() < 0.1:
                parameter.normal_()
            elif parameter.requires_grad and parameter.dim() and (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.requires_grad and parameter.dim() == 2 and "embed" not in name:
                parameter.normal_(std=1.2 / parameter.shape[1] ** 0.5)


@torch.no_grad()
def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The first output of a model; sequences of tokens of any model have this."""
    found: Tensor = model(**{name: value.clone() for name, value in given.items()})[0]
    return found
