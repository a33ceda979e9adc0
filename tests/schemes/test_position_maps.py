"""What a map of positions does to every part of a scheme, and which schemes it refuses."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    AttentionPairs,
    BinaryConfig,
    BlendedConfig,
    BuildContext,
    ComposedConfig,
    DynamicScaling,
    IntegerConfig,
    LearnedConfig,
    LearnedRopeConfig,
    NoneConfig,
    PairwiseBias,
    Part,
    Positions,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
    XposConfig,
    scheme_from_dict,
)
from hf_posenc.schemes.bias.cope import CopeConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig
from hf_posenc.schemes.bias.shaw import ShawConfig
from hf_posenc.schemes.outer_parts import SummedPairwiseBias
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig, PositionShiftConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig, RandomizedMap
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig
from hf_posenc.schemes.reach import Reach

from .position_map_cases import HEADS, LENGTH, build, logits_of
from .table import positions_of


def test_a_map_can_be_given_any_form_of_scheme():
    expected = PositionScaleConfig(AlibiConfig(), factor=2.0)
    assert PositionScaleConfig("alibi", factor=2.0) == expected
    assert PositionScaleConfig({"scheme": "alibi"}, factor=2.0) == expected
    assert scheme_from_dict({"scheme": "position_scale", "inner": {"scheme": "alibi"}, "factor": 2.0}) == expected


def test_a_map_refuses_schedules_and_what_is_no_scheme():
    with pytest.raises(ValueError, match=r"PositionScaleConfig\.inner must be the config of a scheme for one layer"):
        PositionScaleConfig(ScheduleConfig((RopeConfig(), NoneConfig())))
    with pytest.raises(ValueError, match="not a scheme"):
        RandomizedConfig(3)
    with pytest.raises(ValueError, match="encodes no positions"):
        build(PositionShiftConfig(NoneConfig()))


def test_a_map_takes_over_what_the_engine_asks_of_a_scheme():
    assert PositionScaleConfig(T5Config(shared=False)).per_layer
    assert not PositionScaleConfig(T5Config()).per_layer
    assert PositionShiftConfig(IntegerConfig()).invisible_under_layer_norm
    assert not PositionShiftConfig(IntegerConfig(direction="one_hot")).invisible_under_layer_norm
    dynamic = build(PositionShiftConfig(RopeConfig(scaling=DynamicScaling(2.0, 8)))).query_key_map
    assert dynamic.length_dependent
    with pytest.raises(UnsupportedError):
        dynamic.check_cache(9, 20)
    rotation = build(PositionScaleConfig(RopeConfig(rotary_dim=4))).query_key_map
    assert (rotation.rotary_dim, rotation.symmetric, rotation.whole_heads, rotation.width_factor) == (4, True, False, 1)
    assert not rotation.mapped_again


def test_a_chain_of_maps_does_what_any_of_them_does():
    chain = build(BlendedConfig(RopeConfig(rotary_dim=4), XposConfig(), 0.5)).query_key_map
    assert (chain.rotary_dim, chain.symmetric, chain.whole_heads, chain.width_factor) == (8, False, False, 1)
    assert build(BlendedConfig(RopeConfig(), LearnedRopeConfig(sharing="head"), 0.5)).query_key_map.whole_heads


@pytest.mark.parametrize("inner", [AlibiConfig(), ShawConfig()])
def test_positions_that_are_drawn_for_the_last_token_need_later_keys(inner):
    assert build(RandomizedConfig(inner)).logit_bias.reads_later_keys
    assert not build(ComposedConfig((ShawConfig(), inner))).logit_bias.reads_later_keys


def test_a_map_hides_no_correction_of_logits():
    parts = build(PositionShiftConfig(ReRopeConfig(window=1)))
    assert parts.query_key_map.mapped_again
    assert parts.logit_bias.reads_heads
    assert parts.logit_bias.replaces_logits
    assert not build(PositionShiftConfig(ReRopeConfig(AlibiConfig(), window=1))).logit_bias.replaces_logits


class Declares(PairwiseBias):
    """Declares the opposite of every default."""

    length_dependent = needs_whole_sequence = reads_coordinates = whole_positions = finds_documents = True
    reads_heads = replaces_logits = needs_oldest_keys = True
    reads_positions = False
    num_features = 3
    num_shared_features = 1
    zero_within = 4
    no_weight_decay = frozenset({"weight"})
    length_reach = Reach(10, "of a table.", made_for=10)


def test_a_mapped_part_declares_what_the_part_does():
    mapped = SummedPairwiseBias({"inner": Declares()}, PositionShiftConfig().position_map())
    declared = {name for kind in (Part, PairwiseBias) for name in kind.__annotations__}
    # Parameters without weight decay are found at the part that has them, and a map may place tokens by later ones.
    assert mapped.no_weight_decay == frozenset()
    assert mapped.reads_later_keys
    # The map takes one of the positions, and the length that the part was made for is none of the mapped part's.
    assert mapped.length_reach == Reach(9, "of a table.")
    # Tokens that stand near each other may be far apart at their mapped positions.
    assert mapped.zero_within == 0
    for name in declared - {"no_weight_decay", "reads_later_keys", "length_reach", "zero_within"}:
        assert getattr(Declares, name) != getattr(PairwiseBias, name)
        assert getattr(mapped, name) == getattr(Declares, name)


@pytest.mark.parametrize(
    "inner",
    [
        CopeConfig(),
        ForgetGateConfig(),
        ComposedConfig((CopeConfig(), ForgetGateConfig())),
        HierarchicalConfig(separators=(1,)),
    ],
)
def test_schemes_by_the_order_of_tokens_are_refused(inner):
    for config in (PositionShiftConfig, PositionScaleConfig, PositionClampConfig, RandomizedConfig):
        with pytest.raises(
            ValueError, match=rf"{config.__name__}\.inner is '{inner.name}', which depends on the order"
        ):
            build(config(inner))
    if inner.name != "hierarchical":
        message = rf"HierarchicalConfig\.segment is '{inner.name}', which depends on the order"
        with pytest.raises(ValueError, match=message):
            build(HierarchicalConfig(segment=inner))


class NewestFirst(PairwiseBias):
    """Counts keys back from the newest one, wherever tokens say they stand."""

    reads_positions = False

    def forward(self, pairs: AttentionPairs) -> Tensor:
        return -torch.arange(pairs.keys.ids.shape[-1] - 1, -1, -1.0).expand(1, HEADS, len(pairs.query_slots), -1)


@dataclasses.dataclass(frozen=True)
class NewestFirstConfig(SchemeConfig):
    name: ClassVar[str] = "newest_first"

    def build(self, context: BuildContext) -> SchemeParts:
        return SchemeParts(logit_bias=NewestFirst())


def test_a_scheme_of_ones_own_says_that_it_goes_by_the_order_of_tokens():
    inner = NewestFirstConfig()
    for config in (PositionShiftConfig(inner), PositionScaleConfig(ComposedConfig((inner, CopeConfig())))):
        with pytest.raises(ValueError, match="which depends on the order of tokens and not on their positions"):
            build(config)
    both = ComposedConfig((inner, AlibiConfig()))
    assert not build(inner).logit_bias.reads_positions
    assert build(both).logit_bias.reads_positions
    mapped = logits_of(PositionScaleConfig(both, factor=2)) - logits_of(PositionScaleConfig(AlibiConfig(), factor=2))
    alone = logits_of(inner) - logits_of(NoneConfig())
    torch.testing.assert_close(mapped, alone, rtol=0, atol=1e-5)
    assert alone.abs().max() == LENGTH - 1


def test_what_goes_by_positions_beside_order_is_mapped():
    build(PositionScaleConfig(ComposedConfig((RopeConfig(), ForgetGateConfig()))))
    build(PositionScaleConfig(ForgetGateConfig("bias_only")))
    build(PositionScaleConfig(HierarchicalConfig(segment_length=4), factor=2))


def test_a_mapped_table_takes_over_native_rows():
    part = build(PositionShiftConfig(LearnedConfig(num_positions=20), offset=2)).additive
    native = torch.randn(20, 16)
    assert part.adopt(native)
    assert torch.equal(part(positions_of(5))[0], native[2:7])


def test_every_part_of_a_scheme_is_mapped():
    """Sinusoids, a rotation and a bias at once, compared with each of them at positions counted by threes."""
    together = ComposedConfig((SinusoidalConfig(), RopeConfig(), AlibiConfig()))
    thrice = Positions(positions_of(LENGTH).ids * 3, torch.tensor([[LENGTH]]))
    config = PositionScaleConfig(together, factor=3)
    torch.testing.assert_close(logits_of(config), logits_of(together, thrice), rtol=0, atol=1e-5)
    assert torch.equal(build(config).additive(positions_of(LENGTH)), build(SinusoidalConfig()).additive(thrice))


def test_maps_nest_from_the_outside_in():
    config = PositionClampConfig(PositionScaleConfig(SinusoidalConfig(), factor=2), maximum=5)
    expected = build(SinusoidalConfig()).additive(Positions(positions_of(8).ids.clamp(max=5) * 2, torch.tensor([[8]])))
    assert torch.equal(build(config).additive(positions_of(8)), expected)


def test_padding_stays_padding():
    positions = positions_of(3, 6)
    for config in (
        PositionShiftConfig(offset=4),
        PositionScaleConfig(factor=0.5),
        PositionScaleConfig(factor=2),
        PositionClampConfig(maximum=1),
        RandomizedConfig(max_position=9),
        RandomizedConfig(max_position=9, kind="float"),
    ):
        ids = config.position_map().train()(positions)
        assert torch.equal(ids < 0, positions.ids < 0)


def test_shifting_changes_absolute_schemes_and_no_relative_ones():
    for config in (RopeConfig(), AlibiConfig(), T5Config()):
        torch.testing.assert_close(
            logits_of(PositionShiftConfig(config, offset=40)), logits_of(config), rtol=0, atol=2e-5
        )
    shifted = build(PositionShiftConfig(SinusoidalConfig(), offset=2)).additive(positions_of(5))
    assert torch.equal(shifted, build(SinusoidalConfig(offset=2)).additive(positions_of(5)))


def test_whole_factors_keep_positions_whole():
    assert PositionScaleConfig(factor=2.0).position_map()(positions_of(4)).tolist() == [[0, 2, 4, 6]]
    assert PositionScaleConfig(factor=2.0).position_map()(positions_of(4)).dtype == torch.int64
    assert PositionScaleConfig(factor=1.5).position_map()(positions_of(4)).tolist() == [[0.0, 1.5, 3.0, 4.5]]


def test_a_clamped_table_serves_any_length():
    part = build(PositionClampConfig(LearnedConfig(num_positions=4), maximum=3)).additive
    vectors = part(positions_of(9))[0]
    assert torch.equal(vectors[:4], part.inner.weight)
    assert torch.equal(vectors[4:], part.inner.weight[3].expand(5, -1))


WHOLE = [
    LearnedConfig(),
    LearnedConfig(16, extension="interpolate"),
    BinaryConfig(),
    T5Config(),
    ShawConfig(),
    LowRankRelativeConfig(),
    ComposedConfig((RopeConfig(), T5Config())),
    PositionClampConfig(T5Config()),
    RandomizedConfig(),
]


@pytest.mark.parametrize("inner", WHOLE, ids=str)
def test_real_positions_are_refused_by_schemes_of_whole_ones(inner):
    for config in (PositionScaleConfig(inner, factor=0.5), RandomizedConfig(inner, max_position=64, kind="float")):
        with pytest.raises(ValueError, match=f"'{inner.name}', which needs integer positions"):
            build(config)
    build(PositionScaleConfig(inner, factor=2.0))


def test_real_positions_of_a_caller_are_not_blamed_on_a_map():
    halves = Positions(positions_of(5).ids * 0.5, torch.tensor([[5]]))
    for part in (build(LearnedConfig()).additive, RandomizedMap(8, real=False, always=True)):
        with pytest.raises(
            ValueError, match=r"needs integer positions, but these are floating-point \(torch.float32\)"
        ) as error:
            part(halves)
        assert "map" not in str(error.value)
