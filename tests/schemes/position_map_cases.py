"""The place that position maps are tested at, and what a scheme computes there."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.schemes import BuildContext, Positions, SchemeConfig, SchemeParts
from hf_posenc.schemes.logits import positional_logits

from .table import positions_of

HEADS, HEAD_DIM, LENGTH = 4, 8, 14
CONTEXT = BuildContext(16, HEADS, HEAD_DIM, max_positions=64, num_key_value_heads=2)


def build(config: SchemeConfig, training: bool = False) -> SchemeParts:
    torch.manual_seed(0)
    parts = config.build(CONTEXT)
    for part in parts:
        part.train(training)
    return parts


def heads(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(1, HEADS, length, HEAD_DIM, generator=generator),
        torch.randn(1, 2, length, HEAD_DIM, generator=generator),
    )


def logits_of(config: SchemeConfig, positions: Positions | None = None) -> Tensor:
    positions = positions_of(LENGTH) if positions is None else positions
    return positional_logits(build(config), *heads(positions.ids.shape[-1]), positions)


def visible(logits: Tensor) -> Tensor:
    """What a causal mask leaves."""
    return logits.tril()
