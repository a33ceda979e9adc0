"""What a map of positions does to every part of a scheme, segments and far positions, and which schemes are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

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
    CopeConfig,
    DualChunkConfig,
    DynamicScaling,
    ForgetGateConfig,
    HierarchicalConfig,
    IntegerConfig,
    LearnedConfig,
    LearnedRopeConfig,
    LowRankRelativeConfig,
    NoneConfig,
    PairwiseBias,
    Part,
    PositionClampConfig,
    Positions,
    PositionScaleConfig,
    PositionShiftConfig,
    PRopeConfig,
    RandomizedConfig,
    ReRopeConfig,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    SchemeParts,
    SelfExtendConfig,
    ShawConfig,
    SinusoidalConfig,
    T5Config,
    XposConfig,
    YarnScaling,
)
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.outer_parts import SummedPairwiseBias
from hf_posenc.schemes.parts import Reach
from hf_posenc.schemes.position_maps.attention_sinks import AttentionSinksConfig
from hf_posenc.schemes.position_maps.hierarchical import SeparatedSegments
from hf_posenc.schemes.position_maps.randomized import RandomizedMap

from .building import at, build, counted, logits_of, random_heads
from .table import positions_of

LENGTH = 14
TOKENS = counted(LENGTH)
DISTANCE = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)


def logits(config: SchemeConfig, positions: Positions = TOKENS) -> Tensor:
    return logits_of(config, positions)


def test_a_map_refuses_schedules_and_what_is_no_scheme() -> None:
    with pytest.raises(ValueError, match=r"PositionScaleConfig\.inner must be the config of a scheme for one layer"):
        PositionScaleConfig(ScheduleConfig((RopeConfig(), NoneConfig())))
    with pytest.raises(ValueError, match="not a scheme"):
        RandomizedConfig(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="encodes no positions"):
        build(PositionShiftConfig(NoneConfig()))


def test_a_map_takes_over_what_the_engine_asks_of_a_scheme() -> None:
    assert PositionScaleConfig(T5Config(shared=False)).per_layer
    assert not PositionScaleConfig(T5Config()).per_layer
    assert PositionShiftConfig(IntegerConfig()).invisible_under_layer_norm
    assert not PositionShiftConfig(IntegerConfig(direction="one_hot")).invisible_under_layer_norm
    dynamic: Any = build(PositionShiftConfig(RopeConfig(scaling=DynamicScaling(2.0, 8)))).query_key_map
    assert dynamic.length_dependent
    with pytest.raises(UnsupportedError):
        dynamic.check_cache(9, 20)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PositionScaleConfig(RopeConfig(rotary_dim=4)), (4, True, False, 1)),
        # A chain of maps does what any of them does.
        (BlendedConfig(RopeConfig(rotary_dim=4), XposConfig(), 0.5), (16, False, False, 1)),
        (BlendedConfig(RopeConfig(), LearnedRopeConfig(sharing="head"), 0.5), (16, True, True, 1)),
    ],
)
def test_mapped_rotations_say_what_they_do(config: SchemeConfig, expected: tuple[Any, ...]) -> None:
    rotation: Any = build(config).query_key_map
    assert (rotation.rotary_dim, rotation.symmetric, rotation.whole_heads, rotation.width_factor) == expected
    assert not rotation.mapped_again


@pytest.mark.parametrize("inner", [AlibiConfig(), ShawConfig()])
def test_positions_that_are_drawn_for_the_last_token_need_later_keys(inner: SchemeConfig) -> None:
    assert build(RandomizedConfig(inner)).logit_bias.reads_later_keys
    assert not build(ComposedConfig((ShawConfig(), inner))).logit_bias.reads_later_keys


def test_a_map_hides_no_correction_of_logits() -> None:
    parts: Any = build(PositionShiftConfig(ReRopeConfig(window=1)))
    assert parts.query_key_map.mapped_again
    assert parts.logit_bias.reads_heads
    assert parts.logit_bias.replaces_logits
    assert not build(PositionShiftConfig(ReRopeConfig(AlibiConfig(), window=1))).logit_bias.replaces_logits


class Declares(PairwiseBias):
    """Declares the opposite of every default."""

    length_dependent = needs_whole_sequence = reads_coordinates = whole_positions = finds_documents = True
    reads_heads = replaces_logits = needs_oldest_keys = sums_tokens = True
    reads_positions = False
    num_features = 3
    num_shared_features = 1
    zero_below = 4
    no_weight_decay = frozenset({"weight"})
    length_reach = Reach(10, "of a table.", made_for=10)


def test_a_mapped_part_declares_what_the_part_does() -> None:
    mapped = SummedPairwiseBias({"inner": Declares()}, PositionShiftConfig().position_map())
    declared = {name for kind in (Part, PairwiseBias) for name in kind.__annotations__}
    # Parameters without weight decay are found at the part that has them, and a map may place tokens by later ones.
    assert mapped.no_weight_decay == frozenset()
    assert mapped.reads_later_keys
    # The map takes one of the positions, and the length that the part was made for is none of the mapped part's.
    assert mapped.length_reach == Reach(9, "of a table.")
    # Tokens that stand near each other may be far apart at their mapped positions.
    assert mapped.zero_below == 0
    for name in declared - {"no_weight_decay", "reads_later_keys", "length_reach", "zero_below"}:
        assert getattr(Declares, name) != getattr(PairwiseBias, name)
        assert getattr(mapped, name) == getattr(Declares, name)


class NewestFirst(PairwiseBias):
    """Counts keys back from the newest one, wherever tokens say they stand."""

    reads_positions = False

    def forward(self, pairs: AttentionPairs) -> Tensor:
        counted_back = -torch.arange(pairs.keys.ids.shape[-1] - 1, -1, -1.0)
        return counted_back.expand(1, pairs.query.shape[1], len(pairs.query_slots), -1)


@dataclasses.dataclass(frozen=True)
class NewestFirstConfig(SchemeConfig):
    name: ClassVar[str] = "newest_first"

    def build(self, context: BuildContext) -> SchemeParts:
        return SchemeParts(logit_bias=NewestFirst())


@pytest.mark.parametrize("config", [PositionShiftConfig, PositionScaleConfig, PositionClampConfig, RandomizedConfig])
@pytest.mark.parametrize(
    "inner",
    [
        CopeConfig(),
        ForgetGateConfig(),
        ComposedConfig((CopeConfig(), ForgetGateConfig())),
        HierarchicalConfig(separators=(1,)),
        NewestFirstConfig(),
        ComposedConfig((NewestFirstConfig(), CopeConfig())),
    ],
    ids=lambda inner: inner.name,
)
def test_schemes_by_the_order_of_tokens_are_refused(inner: SchemeConfig, config: Any) -> None:
    message = rf"is '{inner.name}', which depends on the order of tokens and not on their positions"
    with pytest.raises(ValueError, match=rf"{config.__name__}\.inner {message}"):
        build(config(inner))
    if inner.name != "hierarchical":
        with pytest.raises(ValueError, match=rf"HierarchicalConfig\.segment {message}"):
            build(HierarchicalConfig(segment=inner))


def test_what_goes_by_positions_beside_order_is_mapped() -> None:
    build(PositionScaleConfig(ComposedConfig((RopeConfig(), ForgetGateConfig()))))
    build(PositionScaleConfig(ForgetGateConfig("bias_only")))
    build(PositionScaleConfig(HierarchicalConfig(segment_length=4), factor=2))
    inner = NewestFirstConfig()
    both = ComposedConfig((inner, AlibiConfig()))
    assert not build(inner).logit_bias.reads_positions
    assert build(both).logit_bias.reads_positions
    mapped = logits(PositionScaleConfig(both, factor=2)) - logits(PositionScaleConfig(AlibiConfig(), factor=2))
    alone = logits(inner) - logits(NoneConfig())
    torch.testing.assert_close(mapped, alone, rtol=0, atol=1e-5)
    assert alone.abs().max().item() == pytest.approx(LENGTH - 1, abs=1e-5)


def test_every_part_of_a_scheme_is_mapped() -> None:
    """Sinusoids, a rotation and a bias at once, compared with each of them at positions counted by threes."""
    together = ComposedConfig((SinusoidalConfig(), RopeConfig(), AlibiConfig()))
    thrice = at(TOKENS.ids * 3)
    config = PositionScaleConfig(together, factor=3)
    torch.testing.assert_close(logits(config), logits(together, thrice), rtol=0, atol=1e-5)
    assert torch.equal(build(config).additive(TOKENS), build(SinusoidalConfig()).additive(thrice))


def test_a_mapped_table_takes_over_native_rows() -> None:
    part: Any = build(PositionShiftConfig(LearnedConfig(num_positions=20), offset=2)).additive
    native = torch.randn(20, part.inner.weight.shape[1])
    assert part.adopt(native)
    assert torch.equal(part(counted(5))[0], native[2:7])


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (PositionShiftConfig(SinusoidalConfig(), offset=2), [2, 3, 4]),
        # Maps nest from the outside in.
        (PositionClampConfig(PositionScaleConfig(SinusoidalConfig(), factor=2), maximum=5), [0, 2, 4, 6, 8, 10, 10]),
        (PositionScaleConfig(SinusoidalConfig(), factor=1.5), [0.0, 1.5, 3.0, 4.5]),
    ],
)
def test_added_vectors_are_those_of_mapped_positions(config: SchemeConfig, ids: list[float]) -> None:
    assert torch.equal(build(config).additive(counted(len(ids))), build(SinusoidalConfig()).additive(at(ids)))


def test_padding_stays_padding_and_whole_factors_keep_positions_whole() -> None:
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
    assert PositionScaleConfig(factor=2.0).position_map()(counted(4)).dtype == torch.int64


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
def test_real_positions_are_refused_by_schemes_of_whole_ones(inner: SchemeConfig) -> None:
    for config in (PositionScaleConfig(inner, factor=0.5), RandomizedConfig(inner, max_position=64, kind="float")):
        with pytest.raises(ValueError, match=f"'{inner.name}', which needs integer positions"):
            build(config)
    build(PositionScaleConfig(inner, factor=2.0))


def test_real_positions_of_a_caller_are_not_blamed_on_a_map() -> None:
    for part in (build(LearnedConfig()).additive, RandomizedMap(8, real=False, always=True)):
        with pytest.raises(
            ValueError, match=r"needs integer positions, but these are floating-point \(torch.float32\)"
        ) as error:
            part(at(torch.arange(5) * 0.5))
        assert "map" not in str(error.value)


# --- segments and positions within them


def segments(ids: Any, tokens: Any, **options: Any) -> tuple[list[int], list[int]]:
    """The segment of each token and its place within, where token 9 ends a segment if nothing else is said."""
    positions = dataclasses.replace(at(ids), token_ids=torch.atleast_2d(torch.as_tensor(tokens)))
    config = HierarchicalConfig(**({"separators": (9,)} | options))
    segment, within = (SeparatedSegments(config, within=within)(positions)[0].tolist() for within in (False, True))
    return segment, within


def test_segments_equal_the_official_code() -> None:
    """Fixture: `get_bilevel_ids` of github.com/zhenyuhe00/BiPE (my_modeling_llama_bipe_rope.py), run on these token
    ids with `train_scale=4`; 869 and 13 end a segment."""
    first, second = [5, 13, 7, 8, 869, 9, 9, 9, 9, 13, 13, 4], [869, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    options: dict[str, Any] = {"separators": (869, 13), "max_segment_length": 4}
    of_first = [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4], [0, 1, 0, 1, 2, 0, 1, 2, 3, 3, 0, 0]
    of_second = [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert segments(range(12), first, **options) == of_first
    assert segments(range(12), second, **options) == of_second


@pytest.mark.parametrize(
    ("ids", "tokens", "segment", "within"),
    [
        # Separators in padding and in packed documents before.
        ([-1, -1, 0, 1, 2, 3, 4], [9, 9, 1, 9, 1, 1, 9], [-1, -1, 0, 0, 1, 1, 1], [-1, -1, 0, 1, 0, 1, 2]),
        ([0, 1, 2, 0, 1, 2, 3], [1, 9, 9, 1, 1, 9, 1], [0, 0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 1, 2, 0]),
        ([3, 4, 5, 3, 4], [1, 9, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 1]),
        # Equal positions do not start a document, but documents of one token have no other position.
        ([0, 1, 2, 2, 2, 2], [1, 9, 1, 1, 9, 1], [0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 2, 0]),
        ([0, 0, 0, 1], [9, 9, 9, 1], [0, 0, 0, 1], [0, 0, 0, 0]),
        # Padding between documents and within them.
        ([0, 1, 2, -1, -1, 0, 1], [1, 9, 1, 9, 1, 1, 1], [0, 0, 1, -1, -1, 0, 0], [0, 1, 0, -1, -1, 0, 1]),
        ([-1, 0, 1, -1, 2, 3], [9, 1, 1, 9, 1, 9], [-1, 0, 0, -1, 0, 0], [-1, 0, 1, -1, 2, 3]),
        ([0, 1, -1, 2], [1, 9, 1, 1], [0, 0, -1, 1], [0, 1, -1, 0]),
    ],
)
def test_documents_and_padding(ids: list[int], tokens: list[int], segment: list[int], within: list[int]) -> None:
    assert segments(ids, tokens) == (segment, within)


def test_separators_every_few_tokens_are_segments_of_that_length() -> None:
    fixed, separated = HierarchicalConfig(segment_length=5), HierarchicalConfig(separators=(1,))
    positions = dataclasses.replace(TOKENS, token_ids=(torch.arange(LENGTH) % 5 == 4).long().unsqueeze(0))
    assert torch.equal(logits(separated, positions), logits(fixed, positions))
    assert torch.equal(build(separated).additive(positions), build(fixed).additive(positions))


def test_the_two_positions_of_a_token_go_to_the_two_schemes() -> None:
    parts: Any = build(HierarchicalConfig(segment_length=4))
    vectors = parts.additive(counted(12))[0]
    assert torch.equal(vectors, build(SinusoidalConfig()).additive(counted(4))[0].repeat(3, 1))
    cosine, _ = parts.query_key_map.phases(counted(12))
    expected, _ = build(RopeConfig()).query_key_map.phases(counted(3))
    assert torch.equal(cosine[0], expected[0].repeat_interleave(4, dim=0))
    # One segment leaves attention nothing, and segments of one token are the scheme itself.
    one_segment = logits(HierarchicalConfig(segment_length=LENGTH))
    torch.testing.assert_close(one_segment, logits(NoneConfig()), rtol=0, atol=1e-6)
    assert torch.equal(logits(HierarchicalConfig(segment_length=1)), logits(RopeConfig()))


def test_long_segments_stop_counting() -> None:
    part: Any = build(HierarchicalConfig(LearnedConfig(num_positions=3), max_segment_length=3)).additive
    assert torch.equal(part(counted(6))[0], part.inner.weight[[0, 1, 2, 2, 2, 2]])


def test_separators_need_the_tokens_and_cannot_extend_a_cache() -> None:
    parts: Any = build(HierarchicalConfig(separators=(1,)))
    for tokens in (None, torch.ones(1, 3, dtype=torch.long)):
        with pytest.raises(UnsupportedError, match="input_ids"):
            parts.query_key_map.phases(dataclasses.replace(counted(6), token_ids=tokens))
    for part in parts:
        assert part.needs_whole_sequence
        assert not part.length_dependent
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            part.check_cache(5, 6)
    assert not any(part.needs_whole_sequence for part in build(HierarchicalConfig()))


# --- far positions: Self-Extend and ReRoPE


def attended(config: SchemeConfig) -> Tensor:
    """Causal attention over the vectors that the fixtures were made with, which are queries, keys and values alike."""
    hidden = torch.tensor(
        [[[[2 * math.sin(1 + 3 * token + 5 * component) for component in range(4)] for token in range(LENGTH)]]]
    )
    parts = config.build(BuildContext(4, 1, 4))
    logits = positional_logits(parts, hidden, hidden, TOKENS)
    return (logits.masked_fill(DISTANCE < 0, -torch.inf).softmax(-1) @ hidden)[0, 0, [9, 13]]


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
    # `forward` of github.com/HKUNLP/ChunkLlama (chunkllama_attn_replace.py), which gives the same when it decodes. Both
    # queries are near the start of their chunk, and then both at its end.
    (
        DualChunkConfig(chunk_size=6, local_size=2),
        [[0.205816, 1.8176, 0.825352, -1.349358], [0.921613, 1.656368, 0.018086, -1.646108]],
    ),
    (
        DualChunkConfig(chunk_size=7, local_size=2),
        [[0.204807, 1.843253, 0.840915, -1.366182], [1.062186, 1.723215, -0.084564, -1.77119]],
    ),
    # `llama_pos_shift_attention_forward` of attention_sinks 0.4.0, the package of StreamingLLM's code, one token at a
    # time, with `AttentionSinkKVCache(sinks, window - 1)`.
    (
        AttentionSinksConfig(sinks=2, window=4),
        [[0.364306, 1.861916, 0.692005, -1.469325], [1.358547, 1.666877, -0.412888, -1.901118]],
    ),
    (
        AttentionSinksConfig(sinks=1, window=6),
        [[0.287837, 1.889897, 0.784348, -1.444917], [1.319224, 1.6685, -0.372643, -1.87991]],
    ),
]


@pytest.mark.parametrize(("config", "expected"), OFFICIAL, ids=lambda value: str(value)[:40])
def test_attention_equals_the_official_code(config: SchemeConfig, expected: list[list[float]]) -> None:
    torch.testing.assert_close(attended(config), torch.tensor(expected), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "inner",
    [
        RopeConfig(),
        RopeConfig(layout="interleaved", rotary_dim=4),
        RopeConfig(layout="half_reversed"),
        RopeConfig(scaling=YarnScaling(4.0, 16, beta_fast=4.0)),
        RopeConfig(attention_scaling=1.5),
        PRopeConfig(fraction=0.5),
        AlibiConfig(),
        T5Config(),
    ],
    ids=str,
)
def test_reductions_to_the_scheme_itself(inner: SchemeConfig) -> None:
    for same in (
        SelfExtendConfig(inner, group=1, window=3),
        SelfExtendConfig(inner, group=4, window=LENGTH),
        ReRopeConfig(inner, window=LENGTH),
        ReRopeConfig(inner, window=3, factor=1),
        ReRopeConfig(inner, window=3, factor=1.0),
        DualChunkConfig(inner, chunk_size=LENGTH - 1, local_size=1),
        AttentionSinksConfig(inner, sinks=3, window=LENGTH - 3),
    ):
        assert torch.equal(logits(same).tril(), logits(inner).tril())


@pytest.mark.parametrize(
    "far",
    [
        SelfExtendConfig(group=3, window=4),
        ReRopeConfig(window=4),
        DualChunkConfig(chunk_size=6, local_size=2),
        DualChunkConfig(chunk_size=3, local_size=1),
    ],
    ids=str,
)
def test_near_pairs_keep_their_logits(far: Any) -> None:
    length = 3 * LENGTH
    ids = torch.arange(length).unsqueeze(0)
    near, own = ~far.are_far(ids, ids)[0], ids - ids.T
    assert torch.equal(far.distance(ids, ids)[0, near], own[near])
    past = near & (own <= 0)
    found, plain = (logits(config, counted(length))[..., past] for config in (far, RopeConfig()))
    assert torch.equal(found, plain)
    # Before the first query with a far key, all are near.
    assert [int(row.sum()) for row in near.tril()[: far.first_query]] == list(range(1, far.first_query + 1))
    assert not near[far.first_query, : far.first_query].all()
    assert build(far).logit_bias.zero_below == far.first_query


def test_near_keys_of_dual_chunks_are_at_least_those_of_the_local_window() -> None:
    far, ids = DualChunkConfig(chunk_size=11, local_size=4), torch.arange(60).unsqueeze(0)
    distance, own = -far.distance(ids, ids)[0], (ids.T - ids)
    assert torch.equal(distance[(own >= 0) & (own <= 5)], own[(own >= 0) & (own <= 5)])
    assert distance[own >= 0].max() == 11
    # In every chunk but the first, a query has far keys from its local window on.
    assert [int((distance[i] != own[i])[: i + 1].sum()) for i in (11, 12, 13, 14, 18, 19, 20)] == [
        0,
        7,
        7,
        7,
        7,
        14,
        14,
    ]


def test_far_pairs_of_16_bit_heads_are_as_precise_as_near_ones() -> None:
    parts = build(SelfExtendConfig(group=2, window=4))
    query, key = random_heads(LENGTH)
    half = positional_logits(parts, query.bfloat16(), key.bfloat16(), TOKENS).float()
    error = (half - logits_of(parts, TOKENS)).abs()
    near, far = error[..., (DISTANCE >= 0) & (DISTANCE < 4)].max(), error[..., DISTANCE >= 4].max()
    # A far logit is a near one plus a correction: three roundings to 16 bits where a near one has one.
    assert far < 4 * near


def test_both_a_rotation_and_a_distance_bias_follow() -> None:
    both = ComposedConfig((RopeConfig(), AlibiConfig()))
    bias = logits(SelfExtendConfig(both, group=2, window=4)) - logits(SelfExtendConfig(group=2, window=4))
    alone = logits(SelfExtendConfig(AlibiConfig(), group=2, window=4)) - logits(NoneConfig())
    torch.testing.assert_close(bias.tril(), alone.tril(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [SelfExtendConfig, ReRopeConfig, DualChunkConfig])
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (SinusoidalConfig(), "'sinusoidal', which encodes no distances"),
        (PositionScaleConfig(), "cannot be changed to other positions"),
        (NewestFirstConfig(), "depends on more than the distance"),
    ],
)
def test_schemes_that_would_not_follow_are_refused(config: Any, inner: SchemeConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(config(inner))
