"""Schemes at other positions: what the maps do, what every part of a scheme sees of them, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    AttentionPairs,
    BinaryConfig,
    BuildContext,
    ComposedConfig,
    DynamicScaling,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    NoneConfig,
    PairwiseBias,
    Part,
    Positions,
    PRopeConfig,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
    scheme_from_dict,
)
from hf_posenc.schemes.bias.cope import CopeConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig
from hf_posenc.schemes.bias.shaw import ShawConfig
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig, PositionShiftConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig, SeparatedSegments
from hf_posenc.schemes.position_maps.mapped import MappedBias
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig, RandomizedMap
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig

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


# The mechanism


def test_a_map_can_be_given_any_form_of_scheme():
    expected = PositionScaleConfig(AlibiConfig(), factor=2.0)
    assert PositionScaleConfig("alibi", factor=2.0) == expected
    assert PositionScaleConfig({"scheme": "alibi"}, factor=2.0) == expected
    assert scheme_from_dict({"scheme": "position_scale", "inner": {"scheme": "alibi"}, "factor": 2.0}) == expected


def test_a_map_refuses_schedules_and_what_is_no_scheme():
    with pytest.raises(ValueError, match=r"PositionScaleConfig\.inner has to be the config of a scheme for one layer"):
        PositionScaleConfig(ScheduleConfig((RopeConfig(), NoneConfig())))
    with pytest.raises(ValueError, match="Not a scheme"):
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


def test_a_map_hides_no_correction_of_logits():
    parts = build(PositionShiftConfig(ReRopeConfig(window=1)))
    assert parts.query_key_map.mapped_again
    assert parts.logit_bias.reads_heads
    assert parts.logit_bias.replaces_logits
    assert not build(PositionShiftConfig(ReRopeConfig(AlibiConfig(), window=1))).logit_bias.replaces_logits


class Declares(PairwiseBias):
    """Declares the opposite of every default."""

    length_dependent = reads_coordinates = whole_positions = reads_heads = replaces_logits = True
    num_features = 3
    no_weight_decay = frozenset({"weight"})


def test_a_mapped_part_declares_what_the_part_does():
    mapped = MappedBias(PositionShiftConfig().position_map(), Declares())
    declared = {name for kind in (Part, PairwiseBias) for name in kind.__annotations__}
    # Parameters without weight decay are found at the part that has them.
    assert mapped.no_weight_decay == frozenset()
    for name in declared - {"no_weight_decay"}:
        assert getattr(Declares, name) != getattr(PairwiseBias, name)
        assert getattr(mapped, name) == getattr(Declares, name)


@pytest.mark.parametrize(
    "inner", [CopeConfig(), ForgetGateConfig(), ComposedConfig((CopeConfig(), ForgetGateConfig()))]
)
def test_schemes_by_the_order_of_tokens_are_refused(inner):
    for config in (PositionShiftConfig, PositionScaleConfig, PositionClampConfig, RandomizedConfig):
        with pytest.raises(ValueError, match=rf"{config.__name__}\.inner is '{inner.name}', which goes by the order"):
            build(config(inner))
    with pytest.raises(ValueError, match=rf"HierarchicalConfig\.segment is '{inner.name}', which goes by the order"):
        build(HierarchicalConfig(segment=inner))


def test_a_map_over_segments_between_separators_is_refused():
    for config in (PositionShiftConfig, PositionScaleConfig, PositionClampConfig, RandomizedConfig):
        with pytest.raises(ValueError, match="'hierarchical', which goes by the order"):
            build(config(HierarchicalConfig(separators=(1,))))


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


# Affine and clamped


def test_shifting_changes_absolute_schemes_and_no_relative_ones():
    for config in (RopeConfig(), AlibiConfig(), T5Config()):
        torch.testing.assert_close(
            logits_of(PositionShiftConfig(config, offset=40)), logits_of(config), rtol=0, atol=2e-5
        )
    shifted = build(PositionShiftConfig(SinusoidalConfig(), offset=2)).additive(positions_of(5))
    assert torch.equal(shifted, build(SinusoidalConfig(offset=2)).additive(positions_of(5)))


def test_scaling_positions_of_rope_is_position_interpolation():
    interpolated = logits_of(RopeConfig(scaling=LinearScaling(4.0)))
    torch.testing.assert_close(logits_of(PositionScaleConfig(factor=0.25)), interpolated, rtol=0, atol=1e-6)


def test_a_scale_of_one_a_shift_of_none_and_a_far_clamp_are_the_scheme_itself():
    for config in (RopeConfig(), AlibiConfig(), T5Config()):
        for same in (
            PositionScaleConfig(config, factor=1.0),
            PositionShiftConfig(config, offset=0),
            PositionClampConfig(config, maximum=LENGTH - 1),
        ):
            assert torch.equal(logits_of(same), logits_of(config))


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
        with pytest.raises(ValueError, match=f"'{inner.name}', which needs whole positions"):
            build(config)
    build(PositionScaleConfig(inner, factor=2.0))


def test_far_distances_that_are_real_are_refused_by_t5():
    with pytest.raises(ValueError, match="'t5', which needs whole positions"):
        build(ReRopeConfig(T5Config(), window=4, factor=2.0))


def test_real_positions_of_a_caller_are_not_blamed_on_a_map():
    halves = Positions(positions_of(5).ids * 0.5, torch.tensor([[5]]))
    for part in (build(LearnedConfig()).additive, RandomizedMap(8, real=False, always=True)):
        with pytest.raises(
            ValueError, match=r"needs whole positions, but these are real numbers \(torch.float32\)"
        ) as error:
            part(halves)
        assert "map" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PositionShiftConfig, {"offset": -1}),
        (PositionShiftConfig, {"offset": 1.5}),
        (PositionScaleConfig, {"factor": 0}),
        (PositionScaleConfig, {"factor": math.inf}),
        (PositionClampConfig, {"maximum": -1}),
        (RandomizedConfig, {"max_position": 0}),
        (RandomizedConfig, {"kind": "real"}),
        (RandomizedConfig, {"evaluation": "none"}),
        (HierarchicalConfig, {"segment_length": 0}),
        (HierarchicalConfig, {"separators": 13}),
        (HierarchicalConfig, {"segment_length": 5, "separators": (13,)}),
        (HierarchicalConfig, {"separators": (-1,)}),
        (HierarchicalConfig, {"max_segment_length": 0}),
        (SelfExtendConfig, {"group": 0}),
        (SelfExtendConfig, {"window": 0}),
        (ReRopeConfig, {"window": 0}),
        (ReRopeConfig, {"factor": 0.5}),
    ],
)
def test_options_out_of_range_are_refused(config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        config(**options)


# Randomized


def drawn(positions: Positions, seed: int = 0, max_position: int = 64, real: bool = False) -> Tensor:
    torch.manual_seed(seed)
    return RandomizedMap(max_position, real, always=False).train()(positions)


@pytest.mark.parametrize("real", [False, True])
def test_a_draw_is_ordered_distinct_and_in_range(real):
    for seed in range(20):
        ids = drawn(positions_of(12), seed, 16, real)
        assert (ids.diff() > 0).all()
        assert ids.min() >= 0
        assert ids.max() < 16
        assert ids.dtype == (torch.float32 if real else torch.int64)


def test_drawing_as_many_positions_as_there_are_changes_nothing():
    assert torch.equal(drawn(positions_of(16), max_position=16), positions_of(16).ids)


@pytest.mark.parametrize("real", [False, True])
def test_draws_are_uniform(real):
    """Order statistics: the k-th of n values below L is at k (L + 1) / (n + 1) - 1 on average, or k L / (n + 1)."""
    count, length, limit = 4000, 3, 11
    ids = torch.arange(length).expand(count, -1)
    samples = drawn(Positions(ids, torch.full((count, 1), length)), max_position=limit, real=real).double()
    rank = torch.arange(1, length + 1).double()
    mean = rank * limit / (length + 1) if real else rank * (limit + 1) / (length + 1) - 1
    # The deviation of one sample is below 2.6, so that of the mean is below 0.042; five of them.
    torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=0.21)


def test_a_sequence_draws_for_its_own_length_whatever_its_padding():
    """If only 7 of 8 positions are drawn, the shorter row cannot have the same draw by accident of padding."""
    ids = drawn(positions_of(8, 3), max_position=8)
    assert ids[0].tolist() == list(range(8))
    assert ids[1, :5].tolist() == [-1] * 5
    assert (ids[1, 5:].diff() > 0).all()


def test_packed_documents_start_at_the_first_drawn_position():
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    new = drawn(Positions(ids, torch.tensor([[4]])))
    assert torch.equal(new[:, :3], new[:, 4:])


def test_everything_in_one_forward_shares_a_draw_and_the_next_one_draws_anew():
    config = RandomizedConfig(ComposedConfig((SinusoidalConfig(), RopeConfig(), AlibiConfig())), max_position=64)
    first, second = build(config, training=True), build(config, training=True)
    positions = positions_of(LENGTH)
    vectors = first.additive(positions)
    new = Positions(RandomizedMap(64, real=False, always=True)(positions), positions.lengths)
    assert not torch.equal(new.ids, positions.ids)
    assert torch.equal(vectors, build(SinusoidalConfig()).additive(new))
    logits = positional_logits(first, *heads(), positions)
    torch.testing.assert_close(logits, logits_of(ComposedConfig((RopeConfig(), AlibiConfig())), new), rtol=0, atol=1e-5)
    # Another layer's copy, and a layer that is recomputed for its gradient.
    assert torch.equal(positional_logits(second, *heads(), positions), logits)
    assert torch.equal(positional_logits(first, *heads(), positions), logits)
    torch.manual_seed(1)
    assert not torch.equal(positional_logits(first, *heads(), positions_of(LENGTH)), logits)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("seed", range(5))
def test_a_draw_fits_the_positions_it_is_for_whatever_was_drawn_before(order, seed):
    """The second part counts from 8, so that its draw is of 14 positions and the first one's of 6."""
    plain, shifted = RandomizedMap(16, real=False, always=True), PositionShiftConfig(offset=8).position_map()
    torch.manual_seed(seed)
    positions = positions_of(6)
    asked = [positions, shifted.renumber(positions)]
    found: dict[int, Tensor] = {index: plain(asked[index]) for index in order}
    for ids in found.values():
        assert (ids.diff() > 0).all()
        assert ids.min() >= 0
        assert ids.max() < 16
    # No other order of the parts, and no other layer, finds anything else.
    again = {index: RandomizedMap(16, real=False, always=True)(asked[index]) for index in reversed(order)}
    assert all(torch.equal(found[index], again[index]) for index in order)
    torch.manual_seed(seed)
    alone = positions_of(6)
    assert torch.equal(found[1], plain(shifted.renumber(alone)))


def test_segments_are_drawn_for_as_many_as_there_are():
    """Three segments of 8 positions to draw from, in a sequence of 12 tokens."""
    parts = build(HierarchicalConfig(segment=RandomizedConfig(AlibiConfig(), max_position=8), segment_length=4), True)
    mapped = parts.logit_bias
    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        ids = mapped.inner.position_map(mapped.position_map.renumber(positions_of(12)))[0]
        assert (ids[::4].diff() > 0).all()
        assert ids.max() < 8
        seen.add(tuple(ids[::4].tolist()))
    assert len(seen) > 10


@pytest.mark.parametrize(
    "inner",
    [
        RandomizedConfig(),
        PositionShiftConfig(RandomizedConfig()),
        HierarchicalConfig(segment=RandomizedConfig()),
        ComposedConfig((SinusoidalConfig(), RandomizedConfig(AlibiConfig()))),
    ],
    ids=str,
)
def test_a_draw_of_a_draw_is_refused(inner):
    with pytest.raises(ValueError, match=f"'{inner.name}', which draws positions itself"):
        build(RandomizedConfig(inner))


def test_tables_with_fewer_rows_than_can_be_drawn_are_refused():
    for inner in (LearnedConfig(num_positions=63), ComposedConfig((LearnedConfig(num_positions=63), RopeConfig()))):
        with pytest.raises(ValueError, match=r"positions only.*Give LearnedConfig\.num_positions=64"):
            build(RandomizedConfig(inner, max_position=64))
    with pytest.raises(ValueError, match=r"32 positions only.*Give BinaryConfig\.bits=6"):
        build(RandomizedConfig(BinaryConfig(bits=5), max_position=33))
    build(RandomizedConfig(BinaryConfig(bits=5), max_position=32))
    build(RandomizedConfig(LearnedConfig(num_positions=10, extension="interpolate"), max_position=64))
    build(RandomizedConfig(PositionClampConfig(LearnedConfig(num_positions=10), maximum=9), max_position=64))


def test_outside_training_positions_are_the_tokens_own_unless_asked_for():
    assert torch.equal(logits_of(RandomizedConfig(AlibiConfig())), logits_of(AlibiConfig()))
    always = RandomizedConfig(AlibiConfig(), evaluation="random")
    assert not torch.equal(logits_of(always), logits_of(AlibiConfig()))


def test_more_tokens_than_positions_are_refused_only_while_drawing():
    config = RandomizedConfig(max_position=8)
    logits_of(config, positions_of(9))
    with pytest.raises(SequenceLengthError, match=r"length 9 is longer than the 8 positions.*max_position=16"):
        drawn(positions_of(9), max_position=8)


def test_a_cache_is_refused_only_while_drawing():
    config = RandomizedConfig(ComposedConfig((SinusoidalConfig(), RopeConfig(), AlibiConfig())))
    for part in build(config):
        part.check_cache(5, 6)
    for part in build(config, training=True):
        with pytest.raises(UnsupportedError, match=r"in training mode.*use_cache=False"):
            part.check_cache(5, 6)
    for part in build(dataclasses.replace(config, evaluation="random")):
        with pytest.raises(UnsupportedError, match=r"evaluation='random'.*use_cache=False"):
            part.check_cache(5, 6)


def test_drawing_compiles_without_a_graph_break():
    torch.compiler.reset()
    config = RandomizedConfig(ComposedConfig((SinusoidalConfig(), RopeConfig())), max_position=64)
    parts = build(config, training=True)

    def run(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        positions = Positions(ids, lengths)
        return parts.additive(positions), parts.query_key_map.phases(positions)[0]

    positions = positions_of(LENGTH)
    vectors, cosine = torch.compile(run, backend="eager", fullgraph=True)(positions.ids, positions.lengths)
    # Both components of frequency 1 have the cosine of the same drawn position.
    torch.testing.assert_close(vectors[..., 1], cosine[..., 0], rtol=0, atol=1e-4)
    assert not torch.equal(vectors, build(SinusoidalConfig()).additive(positions))


def test_a_draw_reaches_rows_of_a_table_that_training_never_counts_to():
    parts = build(RandomizedConfig(LearnedConfig(num_positions=64), max_position=64), training=True)
    for _ in range(30):
        parts.additive(positions_of(5)).sum().backward()
    assert (parts.additive.inner.weight.grad[5:] != 0).any(-1).sum() > 30


# Hierarchical


def test_segments_equal_the_official_code():
    """Fixture: `get_bilevel_ids` of github.com/zhenyuhe00/BiPE (my_modeling_llama_bipe_rope.py), run on these token
    ids with `train_scale=4`; 869 and 13 end a segment."""
    tokens = torch.tensor([[5, 13, 7, 8, 869, 9, 9, 9, 9, 13, 13, 4], [869, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    segment = [[0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    within = [[0, 1, 0, 1, 2, 0, 1, 2, 3, 3, 0, 0], [0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3]]
    positions = Positions(torch.arange(12).unsqueeze(0), torch.tensor([[12]]), token_ids=tokens)
    assert SeparatedSegments((869, 13), within=False, last=3)(positions).tolist() == segment
    assert SeparatedSegments((869, 13), within=True, last=3)(positions).tolist() == within


def test_separators_in_padding_and_in_packed_documents_before_count_for_nothing():
    ids = torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3]])
    tokens = torch.tensor([[9, 9, 1, 9, 1, 1, 9], [1, 9, 9, 1, 1, 9, 1]])
    positions = Positions(ids, torch.tensor([[5], [4]]), token_ids=tokens)
    segment = SeparatedSegments((9,), within=False, last=99)(positions)
    within = SeparatedSegments((9,), within=True, last=99)(positions)
    assert segment.tolist() == [[-1, -1, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0, 1]]
    assert within.tolist() == [[-1, -1, 0, 1, 0, 1, 2], [0, 1, 0, 0, 1, 2, 0]]


def segments(ids: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    """The segment of each token and its place within, where token 9 ends a segment."""
    positions = Positions(torch.tensor([ids]), torch.tensor([[len(ids)]]), token_ids=torch.tensor([tokens]))
    segment, within = (SeparatedSegments((9,), within=within, last=99)(positions) for within in (False, True))
    return segment[0].tolist(), within[0].tolist()


def test_equal_positions_do_not_start_a_document():
    assert segments([0, 1, 2, 2, 2, 2], [1, 9, 1, 1, 9, 1]) == ([0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 2, 0])
    # Documents of one token, which have no other position.
    assert segments([0, 0, 0, 1], [9, 9, 9, 1]) == ([0, 0, 0, 1], [0, 0, 0, 0])
    assert segments([3, 4, 5, 3, 4], [1, 9, 1, 1, 1]) == ([0, 0, 1, 0, 0], [0, 1, 0, 0, 1])


def test_padding_between_documents_and_within_them_counts_for_nothing():
    assert segments([0, 1, 2, -1, -1, 0, 1], [1, 9, 1, 9, 1, 1, 1]) == (
        [0, 0, 1, -1, -1, 0, 0],
        [0, 1, 0, -1, -1, 0, 1],
    )
    assert segments([-1, 0, 1, -1, 2, 3], [9, 1, 1, 9, 1, 9]) == ([-1, 0, 0, -1, 0, 0], [-1, 0, 1, -1, 2, 3])
    assert segments([0, 1, -1, 2], [1, 9, 1, 1]) == ([0, 0, -1, 1], [0, 1, -1, 0])


def test_separators_every_few_tokens_are_segments_of_that_length():
    fixed = HierarchicalConfig(segment_length=5)
    tokens = (torch.arange(LENGTH) % 5 == 4).long().unsqueeze(0)
    positions = dataclasses.replace(positions_of(LENGTH), token_ids=tokens)
    separated = HierarchicalConfig(separators=(1,))
    assert torch.equal(logits_of(separated, positions), logits_of(fixed, positions))
    assert torch.equal(build(separated).additive(positions), build(fixed).additive(positions))


def test_the_two_positions_of_a_token_go_to_the_two_schemes():
    parts = build(HierarchicalConfig(segment_length=4))
    vectors = parts.additive(positions_of(12))[0]
    assert torch.equal(vectors[:4], vectors[4:8])
    assert torch.equal(vectors[:4], build(SinusoidalConfig()).additive(positions_of(4))[0])
    cosine, _ = parts.query_key_map.phases(positions_of(12))
    expected, _ = build(RopeConfig()).query_key_map.phases(positions_of(3))
    assert torch.equal(cosine[0], expected[0].repeat_interleave(4, dim=0))


def test_one_segment_is_an_additive_scheme_and_segments_of_one_token_a_relative_one():
    one = logits_of(HierarchicalConfig(segment_length=LENGTH))
    torch.testing.assert_close(one, logits_of(NoneConfig()), rtol=0, atol=1e-6)
    single = logits_of(HierarchicalConfig(segment_length=1))
    assert torch.equal(single, logits_of(RopeConfig()))


def test_long_segments_stop_counting():
    part = build(HierarchicalConfig(LearnedConfig(num_positions=3), max_segment_length=3)).additive
    assert torch.equal(part(positions_of(6))[0], part.inner.weight[[0, 1, 2, 2, 2, 2]])


def test_bipe_alibi_multiplies_the_slopes():
    config = HierarchicalConfig(segment=PositionScaleConfig("alibi", factor=96), segment_length=4)
    bias = logits_of(config) - logits_of(NoneConfig())
    plain = logits_of(AlibiConfig()) - logits_of(NoneConfig())
    torch.testing.assert_close(bias[..., ::4, ::4], 96 * plain[..., :4, :4], rtol=1e-4, atol=1e-4)


def test_unknown_tokens_are_refused():
    parts = build(HierarchicalConfig(separators=(1,)))
    unknown = dataclasses.replace(positions_of(6), token_ids=None)
    for tokens in (None, torch.ones(1, 3, dtype=torch.long)):
        with pytest.raises(UnsupportedError, match="input_ids"):
            parts.query_key_map.phases(dataclasses.replace(unknown, token_ids=tokens))


def test_separators_cannot_extend_a_cache():
    for part in build(HierarchicalConfig(separators=(1,))):
        assert part.length_dependent
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            part.check_cache(5, 6)
    for part in build(HierarchicalConfig()):
        assert not part.length_dependent
        part.check_cache(5, 6)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"within": "rope"}, "within is 'rope'"),
        ({"within": "none"}, "within is 'none'"),
        ({"segment": "sinusoidal"}, "segment is 'sinusoidal'"),
        ({"segment": "none"}, "segment is 'none'"),
    ],
)
def test_schemes_in_the_wrong_place_are_refused(options, found):
    with pytest.raises(ValueError, match=found):
        build(HierarchicalConfig(**options))


# Self-Extend and ReRoPE


def attended(config: SchemeConfig) -> Tensor:
    """Causal attention over the vectors that the fixtures were made with, which are queries, keys and values alike."""
    hidden = torch.tensor(
        [[[[2 * math.sin(1 + 3 * token + 5 * component) for component in range(4)] for token in range(LENGTH)]]]
    )
    parts = config.build(BuildContext(4, 1, 4))
    logits = positional_logits(parts, hidden, hidden, positions_of(LENGTH))
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return (logits.masked_fill(future, -torch.inf).softmax(-1) @ hidden)[0, 0, [9, 13]]


# Each fixture is the attention output of queries 9 and 13: the function was run with identity projections on the
# vectors of `attended` (one head of four dimensions, RoPE of base 10000), a causal mask, and no query scale by log n.
OFFICIAL = [
    # `self_extend_forward` of github.com/datamllab/LongLM (legacy_patch_before_4_38/llama_self_extend_patch.py).
    (
        SelfExtendConfig(group=2, window=4),
        [[0.215253, 1.816913, 0.815526, -1.354245], [1.070312, 1.713524, -0.098188, -1.769228]],
    ),
    (
        SelfExtendConfig(group=3, window=5),
        [[0.099106, 1.816817, 0.931618, -1.288287], [0.992282, 1.730378, -0.010596, -1.736389]],
    ),
    # `forward_with_rerope` of github.com/bojone/rerope (rerope_patch.py), window = 4.
    (
        ReRopeConfig(window=4),
        [[0.260931, 1.794352, 0.757049, -1.36486], [1.050431, 1.740824, -0.062819, -1.776463]],
    ),
    # `forward_with_leaky_rerope` (leaky_rerope_patch.py), window = 4, scaling_factor = 3.
    (
        ReRopeConfig(window=4, factor=3.0),
        [[0.24539, 1.815464, 0.784567, -1.37036], [1.189607, 1.70747, -0.220917, -1.832802]],
    ),
]


@pytest.mark.parametrize(("config", "expected"), OFFICIAL, ids=lambda value: str(value)[:40])
def test_attention_equals_the_official_code(config, expected):
    torch.testing.assert_close(attended(config), torch.tensor(expected), rtol=0, atol=3e-6)


ROTATIONS = [
    RopeConfig(),
    RopeConfig(layout="interleaved", rotary_dim=4),
    RopeConfig(layout="half_reversed"),
    RopeConfig(scaling=YarnScaling(4.0, 16, beta_fast=4.0)),
    RopeConfig(attention_scaling=1.5),
    PRopeConfig(fraction=0.5),
    AlibiConfig(),
    T5Config(),
]


@pytest.mark.parametrize("inner", ROTATIONS, ids=str)
def test_reductions_to_the_scheme_itself(inner):
    expected = visible(logits_of(inner))
    for same in (
        SelfExtendConfig(inner, group=1, window=3),
        SelfExtendConfig(inner, group=4, window=LENGTH),
        ReRopeConfig(inner, window=LENGTH),
    ):
        assert torch.equal(visible(logits_of(same)), expected)
    for factor in (1, 1.0):
        assert torch.equal(visible(logits_of(ReRopeConfig(inner, window=3, factor=factor))), expected)


@pytest.mark.parametrize("inner", ROTATIONS, ids=str)
def test_near_pairs_keep_their_logits_and_far_ones_do_not(inner):
    changed = logits_of(SelfExtendConfig(inner, group=4, window=3)) != logits_of(inner)
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    assert not changed[..., distance < 3].any()
    if inner != T5Config():
        # floor(i / 4) + 3 - floor(j / 4) is i - j again for a few of them.
        assert changed[..., distance > 6].all()


@pytest.mark.parametrize("inner", ROTATIONS, ids=str)
def test_all_keys_past_the_window_of_rerope_are_a_window_away(inner):
    """The logit of a far pair is that of the same query and key at distance `window`."""
    query, key = heads()
    logits = positional_logits(build(ReRopeConfig(inner, window=4)), query, key, positions_of(LENGTH))
    for far in (5, 9, 13):
        at_window = Positions(torch.tensor([[9]]) + torch.tensor([[0, 4]]), torch.tensor([[LENGTH]]))
        pair = positional_logits(build(inner), query[:, :, [0, 13]], key[:, :, [13 - far, 0]], at_window)
        torch.testing.assert_close(logits[..., 13, 13 - far], pair[..., 1, 0], rtol=0, atol=1e-5)


def test_a_decoding_step_sees_the_same_far_pairs_as_the_whole_sequence():
    """Keys are cached as the rotation left them; the last query alone gets the last row of the bias."""
    parts = build(SelfExtendConfig(group=2, window=4))
    positions = positions_of(LENGTH)
    query, key = heads()
    phases = parts.query_key_map.phases(positions)
    query, key = parts.query_key_map.map_query(query, phases), parts.query_key_map.map_key(key, phases)
    whole = parts.logit_bias(AttentionPairs(query, key, torch.arange(LENGTH), positions, 0.5))
    step = parts.logit_bias(AttentionPairs(query[:, :, -1:], key, torch.tensor([LENGTH - 1]), positions, 0.5))
    torch.testing.assert_close(step, whole[:, :, -1:], rtol=0, atol=1e-6)
    assert step.abs().max() > 0.1


def test_far_pairs_of_16_bit_heads_are_as_precise_as_near_ones():
    parts = build(SelfExtendConfig(group=2, window=4))
    query, key = heads()
    exact = positional_logits(parts, query, key, positions_of(LENGTH))
    half = positional_logits(parts, query.bfloat16(), key.bfloat16(), positions_of(LENGTH)).float()
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    error = (half - exact).abs()
    near, far = error[..., (distance >= 0) & (distance < 4)].max(), error[..., distance >= 4].max()
    # A far logit is a near one plus a correction: three roundings to 16 bits where a near one has one.
    assert far < 4 * near


def test_both_a_rotation_and_a_distance_bias_follow():
    both = ComposedConfig((RopeConfig(), AlibiConfig()))
    bias = logits_of(SelfExtendConfig(both, group=2, window=4)) - logits_of(SelfExtendConfig(group=2, window=4))
    alone = logits_of(SelfExtendConfig(AlibiConfig(), group=2, window=4)) - logits_of(NoneConfig())
    torch.testing.assert_close(visible(bias), visible(alone), rtol=0, atol=1e-5)


class ReadsQueries(PairwiseBias):
    def forward(self, pairs):
        return pairs.query @ pairs.expanded_key.transpose(-1, -2)


@dataclasses.dataclass(frozen=True)
class ReadsQueriesConfig(SchemeConfig):
    def build(self, context):
        return SchemeParts(logit_bias=ReadsQueries())


@pytest.mark.parametrize("config", [SelfExtendConfig, ReRopeConfig])
def test_schemes_that_would_not_follow_are_refused(config):
    with pytest.raises(ValueError, match="'sinusoidal', which encodes no distances"):
        build(config(SinusoidalConfig()))
    with pytest.raises(ValueError, match="cannot be turned on to other positions"):
        build(config(PositionScaleConfig()))
    with pytest.raises(ValueError, match="reads more than the distance"):
        build(config(ReadsQueriesConfig()))
    with pytest.raises(ValueError, match="bidirectional"):
        config().build(dataclasses.replace(CONTEXT, causal=False))
