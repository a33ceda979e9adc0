"""The effect of a position map on every part of a scheme, refused schemes, and segments."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    AttentionPairs,
    BinaryConfig,
    BuildContext,
    ComposedConfig,
    CopeConfig,
    ForgetGateConfig,
    HierarchicalConfig,
    IntegerConfig,
    LearnedConfig,
    LowRankRelativeConfig,
    NoneConfig,
    PairwiseBias,
    Part,
    PositionClampConfig,
    PositionScaleConfig,
    PositionShiftConfig,
    RandomizedConfig,
    ReRopeConfig,
    RopeConfig,
    SchemeConfig,
    SchemeParts,
    ShawConfig,
    SinusoidalConfig,
    T5Config,
)
from hf_posenc.schemes.outer_parts import SummedPairwiseBias
from hf_posenc.schemes.parts import Reach
from hf_posenc.schemes.position_maps.hierarchical import SeparatedSegments
from hf_posenc.schemes.position_maps.randomized import RandomizedMap

from .building import LENGTH, at, build, counted, logits_of as logits


def test_a_map_takes_over_what_the_engine_asks_of_a_scheme() -> None:
    assert PositionScaleConfig(T5Config(shared=False)).per_layer
    assert not PositionScaleConfig(T5Config()).per_layer
    assert PositionShiftConfig(IntegerConfig()).invisible_under_layer_norm
    assert not PositionShiftConfig(IntegerConfig(direction="one_hot")).invisible_under_layer_norm


def test_a_map_hides_no_correction_of_logits() -> None:
    parts: Any = build(PositionShiftConfig(ReRopeConfig(window=1)))
    assert parts.query_key_map.mapped_again
    assert not build(PositionShiftConfig()).query_key_map.mapped_again  # type: ignore[union-attr]
    assert parts.logit_bias.reads_heads
    assert parts.logit_bias.replaces_logits
    assert not build(PositionShiftConfig(ReRopeConfig(AlibiConfig(), window=1))).logit_bias.replaces_logits


class Declares(PairwiseBias):
    """Declares the opposite of every default."""

    length_dependent = needs_whole_sequence = reads_coordinates = whole_positions = finds_documents = True
    reads_heads = replaces_logits = needs_oldest_keys = sums_tokens = hides_pairs = True
    reads_positions = reads_content = False
    num_features = 3
    num_shared_features = 1
    zero_below = 4
    no_weight_decay = frozenset({"weight"})
    length_reach = Reach(10, "of a table.", made_for=10)


def test_a_mapped_part_declares_what_the_part_does() -> None:
    mapped = SummedPairwiseBias({"inner": Declares()}, PositionShiftConfig().position_map())
    declared = {name for kind in (Part, PairwiseBias) for name in kind.__annotations__ if name[0] != "_"}
    # Parameters without weight decay are found at the part that has them, and a map may place tokens by later ones.
    assert mapped.no_weight_decay == frozenset()
    assert mapped.reads_later_keys
    # The map takes one of the positions, and the length that the part was made for is none of the mapped part's.
    assert mapped.length_reach == Reach(9, "of a table.")
    # Tokens that stand near each other may be far apart at their mapped positions.
    assert mapped.zero_below == 0
    # Where a part is placed is no declaration.
    for name in declared - {"no_weight_decay", "reads_later_keys", "length_reach", "zero_below", "of_one_layer"}:
        assert getattr(Declares, name) != getattr(PairwiseBias, name)
        assert getattr(mapped, name) == getattr(Declares, name)


class NewestFirst(PairwiseBias):
    """Counts keys back from the newest one, regardless of the positions of tokens."""

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


def test_a_mapped_table_takes_over_native_rows() -> None:
    part: Any = build(PositionShiftConfig(LearnedConfig(num_positions=20), offset=2)).additive
    native = torch.randn(20, part.inner.weight.shape[1])
    assert part.adopt(native)
    assert torch.equal(part(counted(5))[0], native[2:7])


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


def test_places_within_segments_go_to_the_scheme_of_vectors() -> None:
    parts: Any = build(HierarchicalConfig(segment_length=4))
    vectors = parts.additive(counted(12))[0]
    assert torch.equal(vectors, build(SinusoidalConfig()).additive(counted(4))[0].repeat(3, 1))


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
