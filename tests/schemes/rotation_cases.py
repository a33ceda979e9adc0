"""What the tests of maps beyond RoPE share: parts with trained parameters, and their logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes import BuildContext, Positions, SchemeConfig, SchemeParts, YarnScaling
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.rotary.hope import HopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceConfig
from hf_posenc.schemes.rotary.string import StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig

from .table import HEAD_DIM, HEADS, KEY_VALUE_HEADS, context_for, positions_of


def map_of(config: SchemeConfig, context: BuildContext | None = None) -> Any:
    return config.build(context or context_for(config)).query_key_map


def drawn(config: SchemeConfig) -> SchemeParts:
    """The parts with every parameter moved away from where it starts."""
    parts = config.build(context_for(config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return parts


def query_and_key(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(1, HEADS, length, HEAD_DIM, generator=generator),
        torch.randn(1, KEY_VALUE_HEADS, length, HEAD_DIM, generator=generator),
    )


def logits(parts: SchemeParts, ids: list[int]) -> Tensor:
    query, key = query_and_key(len(ids))
    return positional_logits(parts, query, key, Positions(torch.tensor([ids]), torch.tensor([[max(ids) + 1]])))


def mapped(part: Any, length: int = 40) -> tuple[Tensor, Tensor]:
    query, key = query_and_key(length)
    phases = part.phases(positions_of(length))
    return part.map_query(query, phases), part.map_key(key, phases)


#: With parameters.
TRAINED = [
    PopeConfig(),
    PopeConfig(theta=100.0, initial_delta="uniform"),
    LearnedRopeConfig(),
    LearnedRopeConfig(sharing="layer", rotary_dim=12, layout="interleaved"),
    LearnedRopeConfig(sharing="head"),
    StringConfig(),
    StringConfig(per_head=False, rotary_dim=12, layout="interleaved"),
    StringConfig(learned_frequencies=False),
    StringConfig("circulant"),
    StringConfig("circulant", per_head=False, rotary_dim=8),
]

#: Whose logits depend on distance only.
RELATIVE = [
    XposConfig(),
    XposConfig(origin=300.0, layout="half"),
    HopeConfig(),
    ResonanceConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0)),
    *TRAINED,
]
