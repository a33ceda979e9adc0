"""Other positions for a scheme."""

from __future__ import annotations

from hf_posenc.schemes import (
    AlibiConfig,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    RopeConfig,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig, PositionShiftConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig

from ..references import position_maps
from .row import Row

ROPE = RopeConfig(layout="half")

ROWS: dict[str, Row] = {
    # The table runs outside training, where the paper's draw gives way to the tokens' own positions. The first variant
    # has a scheme that Llama's own differs from.
    "randomized": Row(
        "logits",
        position_maps.identity,
        (
            RandomizedConfig(AlibiConfig(), max_position=64),
            RandomizedConfig(ROPE, max_position=64, kind="float"),
            RandomizedConfig(T5Config(), max_position=64),
        ),
        reach=(64, 64, 64),
        everywhere=True,
        marks="++++++.++++",
    ),
    "position_shift": Row(
        "additive",
        position_maps.position_shift,
        (
            PositionShiftConfig(SinusoidalConfig(), offset=5),
            PositionShiftConfig(LearnedConfig(num_positions=70), offset=2),
            PositionShiftConfig(IntegerConfig(direction="learned")),
        ),
        reach=(None, 68, None),
        marks="++++++.++++",
    ),
    "position_scale": Row(
        "logits",
        position_maps.position_scale,
        (
            PositionScaleConfig(ROPE, factor=0.25),
            PositionScaleConfig(RopeConfig(theta=500.0, rotary_dim=8, layout="interleaved"), factor=2.0),
            PositionScaleConfig(AlibiConfig(), factor=1.5),
            PositionScaleConfig(T5Config(), factor=3),
        ),
        marks="++++++.++++",
    ),
    "position_clamp": Row(
        "logits",
        position_maps.position_clamp,
        (PositionClampConfig(ROPE, maximum=6), PositionClampConfig(AlibiConfig(), maximum=20)),
        marks="-+--++.++++",
    ),
    "hierarchical": Row(
        "logits",
        position_maps.hierarchical,
        (
            HierarchicalConfig(segment=ROPE, segment_length=4),
            HierarchicalConfig(LearnedConfig(num_positions=8), AlibiConfig(), 10, max_segment_length=8),
            HierarchicalConfig(segment=T5Config(), segment_length=3),
        ),
        everywhere=True,
        marks="++--++-++++",
    ),
    "self_extend": Row(
        "logits",
        position_maps.self_extend,
        (
            SelfExtendConfig(ROPE, group=2, window=4),
            SelfExtendConfig(RopeConfig(theta=500.0, rotary_dim=8, layout="interleaved"), group=3, window=10),
            SelfExtendConfig(RopeConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0), layout="half"), group=4, window=6),
            SelfExtendConfig(AlibiConfig(), group=2, window=4),
            SelfExtendConfig(T5Config(), group=4, window=7),
        ),
        causal_only=True,
        marks="-+-.++.++++",
    ),
    "rerope": Row(
        "logits",
        position_maps.rerope,
        (
            ReRopeConfig(ROPE, window=4),
            ReRopeConfig(RopeConfig(scaling=LinearScaling(2.0), layout="interleaved"), window=10, factor=3.0),
            ReRopeConfig(AlibiConfig(), window=5, factor=2.0),
        ),
        causal_only=True,
        marks="-++.++.++++",
    ),
}
