"""The seeds' schemes."""

from __future__ import annotations

import dataclasses

from hf_posenc.schemes import (
    AlibiConfig,
    BinaryConfig,
    DynamicScaling,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoneConfig,
    NormalizedIntegerConfig,
    NtkScaling,
    PRopeConfig,
    RopeConfig,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)

from ..references import seeds
from .row import Row

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

ROWS: dict[str, Row] = {
    "none": Row(
        "none",
        None,
        (NoneConfig(),),
        marks="-.+.++..-..",
    ),
    "integer": Row(
        "additive",
        seeds.integer,
        (IntegerConfig(), IntegerConfig(0.1, "one_hot"), IntegerConfig(0.5, "learned")),
        marks="++---+..---",
    ),
    "normalized_integer": Row(
        "additive",
        seeds.normalized_integer,
        (
            NormalizedIntegerConfig(),
            NormalizedIntegerConfig(subtract_one=True, direction="one_hot"),
            NormalizedIntegerConfig(length=100, scale=2.0, direction="learned"),
        ),
        marks="+---++..---",
    ),
    "binary": Row(
        "additive",
        seeds.binary,
        (BinaryConfig(), BinaryConfig(bits=9, scale=0.1)),
        reach=(64, 512),
        marks="++---+..-++",
    ),
    "sinusoidal": Row(
        "additive",
        seeds.sinusoidal,
        (
            SinusoidalConfig(),
            SinusoidalConfig(layout="concatenated", scale=0.5),
            SinusoidalConfig(frequencies="tensor2tensor", layout="concatenated", offset=2),
            SinusoidalConfig(frequencies="tensor2tensor", base=100.0),
        ),
        marks="++-+++..+++",
    ),
    "learned": Row(
        "additive",
        seeds.learned,
        (
            LearnedConfig(),
            LearnedConfig(num_positions=50, offset=2),
            LearnedConfig(16, 2, "interpolate"),
            LearnedConfig(grid=(7, 8), num_prefix_tokens=2, interpolation="bilinear", antialias=True),
        ),
        reach=(64, 50, None, 58),
        marks="++---+..-++",
    ),
    "t5": Row(
        "bias",
        seeds.t5,
        (T5Config(), T5Config(16, 20, bidirectional=True, shared=False)),
        marks="-++.++..-++",
        causal_marks="-++.++..-++",
    ),
    "alibi": Row(
        "bias",
        seeds.alibi,
        (AlibiConfig(), AlibiConfig("asymmetric"), AlibiConfig(learnable=True)),
        of_start=True,
        marks="+++.++..+--",
    ),
    "rope": Row(
        "map",
        seeds.rope,
        ROPE_VARIANTS,
        marks="++++++.++++",
    ),
    "p_rope": Row(
        "map",
        seeds.p_rope,
        (PRopeConfig(layout="half"), PRopeConfig(1e6, 0.25, 12, "interleaved")),
        marks="++++++.++++",
    ),
}

#: The engine was built on these: each goes through every build of architecture.
ROWS = {name: dataclasses.replace(row, everywhere=True) for name, row in ROWS.items()}
