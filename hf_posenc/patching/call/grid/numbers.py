"""Numbers of tokens in place of rotary phases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def numbered(phases: Any) -> Any:
    """Numbers in the shape of phases, `(tokens, width)`: every value of a token is its number."""
    if isinstance(phases, tuple):
        return tuple(map(numbered, phases))
    numbers = torch.arange(phases.shape[-2], device=phases.device, dtype=torch.float32)
    return numbers.unsqueeze(-1).expand(phases.shape)


def numbers_in(phases: Any) -> Tensor:
    """`(length,)` int64: the numbers of the tokens of a layer, from the phases that it received."""
    values: Tensor = phases[0] if isinstance(phases, tuple) else phases
    return values[..., 0].reshape(-1).long()
