"""One row per scheme: the variants that the generic tests go through, and the reference each must equal.

A new scheme adds a row here; `test_all_schemes.py` fails until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.schemes import (
    AlibiConfig,
    BinaryConfig,
    BuildContext,
    ComposedConfig,
    DynamicScaling,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoneConfig,
    NormalizedIntegerConfig,
    NtkScaling,
    Positions,
    PRopeConfig,
    RopeConfig,
    SchemeConfig,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)

from . import references

HIDDEN, HEADS, HEAD_DIM, MAX_POSITIONS = 24, 6, 16, 64


@dataclass(frozen=True)
class Row:
    """Args:
    kind: "none", "additive", "map", "bias" or "mixed".
    reference: the scheme's function in `references`, or `None` where there is nothing to compute.
    variants: configs that together reach every option.
    """

    kind: str
    reference: Callable[..., Any] | None
    variants: tuple[SchemeConfig, ...]


ROPE_VARIANTS = (
    RopeConfig(layout="half"),
    RopeConfig(theta=500_000.0, layout="interleaved"),
    RopeConfig(rotary_dim=8, layout="half"),
    RopeConfig(rotary_dim=12, layout="half_reversed"),
    RopeConfig(partial_rotary_factor=0.7, layout="interleaved"),
    RopeConfig(inverse_frequencies=(1.0, 0.5, 0.0), layout="half", attention_scaling=1.25),
    RopeConfig(scaling=LinearScaling(4.0), layout="half"),
    RopeConfig(scaling=NtkScaling(4.0), layout="interleaved"),
    RopeConfig(scaling=DynamicScaling(2.0, 20), layout="half"),
    RopeConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0), layout="half"),
    RopeConfig(
        scaling=LongRopeScaling(
            tuple(1.0 + 0.1 * pair for pair in range(8)), tuple(2.0 + pair for pair in range(8)), 20, factor=4.0
        ),
        layout="interleaved",
    ),
    RopeConfig(scaling=Llama3Scaling(8.0, original_max_positions=64), layout="half"),
)

TABLE: dict[str, Row] = {
    "none": Row("none", None, (NoneConfig(),)),
    "integer": Row(
        "additive",
        references.integer,
        (IntegerConfig(), IntegerConfig(0.1, "one_hot"), IntegerConfig(0.5, "learned")),
    ),
    "normalized_integer": Row(
        "additive",
        references.normalized_integer,
        (
            NormalizedIntegerConfig(),
            NormalizedIntegerConfig(subtract_one=True, direction="one_hot"),
            NormalizedIntegerConfig(length=100, scale=2.0, direction="learned"),
        ),
    ),
    "binary": Row("additive", references.binary, (BinaryConfig(), BinaryConfig(bits=9, scale=0.1))),
    "sinusoidal": Row(
        "additive",
        references.sinusoidal,
        (
            SinusoidalConfig(),
            SinusoidalConfig(layout="concatenated", scale=0.5),
            SinusoidalConfig(frequencies="tensor2tensor", layout="concatenated", offset=2),
            SinusoidalConfig(frequencies="tensor2tensor", base=100.0),
        ),
    ),
    "learned": Row(
        "additive",
        references.learned,
        (LearnedConfig(), LearnedConfig(num_positions=50, offset=2), LearnedConfig(16, 2, "interpolate")),
    ),
    "t5": Row("bias", references.t5, (T5Config(), T5Config(16, 20, bidirectional=True, shared=False))),
    "alibi": Row("bias", references.alibi, (AlibiConfig(), AlibiConfig("asymmetric"), AlibiConfig(learnable=True))),
    "rope": Row("map", references.rope, ROPE_VARIANTS),
    "p_rope": Row(
        "map",
        references.p_rope,
        (PRopeConfig(layout="half"), PRopeConfig(1e6, 0.25, 12, "interleaved")),
    ),
    "composed": Row(
        "mixed",
        None,
        (
            ComposedConfig((SinusoidalConfig(), LearnedConfig(), RopeConfig(scaling=LinearScaling(2.0)))),
            ComposedConfig((T5Config(), AlibiConfig(learnable=True))),
        ),
    ),
}

VARIANTS = [
    (name, config, f"{name}-{index}") for name, row in TABLE.items() for index, config in enumerate(row.variants)
]


def context_for(config: SchemeConfig) -> BuildContext:
    """A small place to build at; bidirectional for the variants that need it."""
    return BuildContext(
        HIDDEN, HEADS, HEAD_DIM, causal=config != AlibiConfig("asymmetric"), max_positions=MAX_POSITIONS
    )


def positions_of(*lengths: int, padded_to: int | None = None) -> Positions:
    """Left-padded rows of the given lengths; padding has the position -1."""
    width = padded_to or max(lengths)
    ids = torch.arange(width).unsqueeze(0) - (width - torch.tensor(lengths).unsqueeze(1))
    return Positions(ids.clamp(min=-1), torch.tensor(lengths).unsqueeze(1))
