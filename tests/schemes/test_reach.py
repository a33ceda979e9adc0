"""The longest sequence that each scheme states: it is encoded, and longer ones are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_posenc.errors import SequenceLengthError
from hf_posenc.schemes import (
    AlibiConfig,
    BinaryConfig,
    BlendedConfig,
    ClippedScaling,
    ComposedConfig,
    DynamicScaling,
    DynamicYarnScaling,
    HierarchicalConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoneConfig,
    NtkScaling,
    PositionClampConfig,
    PositionScaleConfig,
    PositionShiftConfig,
    RandomizedConfig,
    ReRopeConfig,
    ResonanceConfig,
    RopeConfig,
    RopeScaling,
    SchemeConfig,
    SchemeParts,
    XposConfig,
    YarnScaling,
)
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.parts import Reach, shortest

from .building import at, part_of, random_heads
from .table import HIDDEN, TABLE, context_for

LONG = 5000

TABLE_CASES = [
    pytest.param(config, row.reach[index] if row.reach else None, id=f"{name}-{index}")
    for name, row in TABLE.items()
    for index, config in enumerate(row.variants)
    if not isinstance(config, LayeredConfig)
]

COMPOSED = [
    (ComposedConfig((LearnedConfig(40), BinaryConfig(bits=5), AlibiConfig())), 32),
    (PositionScaleConfig(LearnedConfig(40), factor=3), 14),
    (PositionScaleConfig(XposConfig(scale_base=20.0), factor=0.5), 2554),
    (PositionShiftConfig(LearnedConfig(40), offset=39), 1),
    (PositionClampConfig(LearnedConfig(40), maximum=39), None),
    (PositionClampConfig(LearnedConfig(40), maximum=40), 40),
    (HierarchicalConfig(LearnedConfig(8), AlibiConfig(), 10, max_segment_length=8), None),
    (HierarchicalConfig(LearnedConfig(8), AlibiConfig(), 10), 8),
    (RandomizedConfig(LearnedConfig(70), max_position=64), 64),
    (BlendedConfig(LearnedConfig(40), BinaryConfig(bits=6), 0.5), 40),
    (BlendedConfig(LearnedConfig(40), BinaryConfig(bits=6), 1.0), 64),
    (BlendedConfig(LearnedConfig(40), NoneConfig(), 1.0), 40),
    (BlendedConfig(XposConfig(scale_base=20.0), NoneConfig(), 0.5), 2554),
    (ReRopeConfig(RopeConfig(), window=512), None),
]


def encode(parts: SchemeParts, length: int) -> None:
    """The first and the last token of a sequence, in training mode, where randomised positions are drawn."""
    positions = dataclasses.replace(at([0, length - 1]), token_ids=torch.zeros(1, 2, dtype=torch.int64))
    if parts.additive is not None:
        parts.additive(positions)
    positional_logits(parts, *random_heads(2), positions, torch.randn(1, 2, HIDDEN))


@pytest.mark.parametrize(("config", "expected"), [*TABLE_CASES, *COMPOSED])
def test_a_scheme_encodes_exactly_as_many_tokens_as_it_says(config: SchemeConfig, expected: int | None) -> None:
    parts = config.build(context_for(config))
    reach = shortest(part.length_reach for part in parts)
    assert reach.length == expected
    encode(parts, LONG if expected is None else expected)
    if expected is not None:
        with pytest.raises(SequenceLengthError) as raised:
            encode(parts, expected + 1)
        assert reach.remedy in str(raised.value)
        assert reach.remedy


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, None),
        (YarnScaling(4.0, 2048), 8192),
        (Llama3Scaling(8.0), 65536),
        (LinearScaling(2.5), 160),
        (NtkScaling(2.0), 128),
        (DynamicScaling(4.0, 64), None),
        (DynamicYarnScaling(64, 4.0), None),
        (ClippedScaling(4), None),
        (ClippedScaling(4, scaling=LinearScaling(2.5)), 160),
        (LongRopeScaling((1.0,) * 8, (2.0,) * 8, 32, factor=4.0), 128),
        (LongRopeScaling((1.0,) * 8, (2.0,) * 8, 32), None),
    ],
)
def test_a_scaling_says_the_length_it_was_made_for(scaling: RopeScaling | None, expected: int | None) -> None:
    for config in (RopeConfig(scaling=scaling), ResonanceConfig(scaling=scaling)):
        assert part_of(config).length_reach == Reach(made_for=expected)
