"""What the tests of maps beyond RoPE share: parts with trained parameters, and their logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes import BuildContext, Positions, SchemeConfig, SchemeParts
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.xpos import XposConfig

from .table import HEAD_DIM, HEADS, KEY_VALUE_HEADS, TABLE, context_for, parts_for, positions_of


def map_of(config: SchemeConfig, context: BuildContext | None = None) -> Any:
    return config.build(context or context_for(config)).query_key_map


def drawn(config: SchemeConfig) -> SchemeParts:
    """The parts with every parameter moved away from where it starts."""
    return parts_for(config, trained=True)


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


#: Whose logits depend on distance only.
RELATIVE = [
    config
    for name in ("xpos", "pope", "string", "learned_rope", "hope", "resonance")
    for config in TABLE[name].variants
    if getattr(config, "scaling", None) is None or not config.scaling.length_dependent
] + [XposConfig(origin=300.0, layout="half"), PopeConfig(theta=100.0, initial_delta="uniform")]
