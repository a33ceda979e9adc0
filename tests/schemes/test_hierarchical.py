"""Segments and positions within them: equality with the official code, and where documents and padding start."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    LearnedConfig,
    NoneConfig,
    Positions,
    RopeConfig,
    SinusoidalConfig,
)
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig, SeparatedSegments

from .position_map_cases import LENGTH, build, logits_of
from .table import positions_of


def test_segments_equal_the_official_code():
    """Fixture: `get_bilevel_ids` of github.com/zhenyuhe00/BiPE (my_modeling_llama_bipe_rope.py), run on these token
    ids with `train_scale=4`; 869 and 13 end a segment."""
    tokens = torch.tensor([[5, 13, 7, 8, 869, 9, 9, 9, 9, 13, 13, 4], [869, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    segment = [[0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    within = [[0, 1, 0, 1, 2, 0, 1, 2, 3, 3, 0, 0], [0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3]]
    positions = Positions(torch.arange(12).unsqueeze(0), torch.tensor([[12]]), token_ids=tokens)
    config = HierarchicalConfig(separators=(869, 13), max_segment_length=4)
    assert SeparatedSegments(config, within=False)(positions).tolist() == segment
    assert SeparatedSegments(config, within=True)(positions).tolist() == within


def test_separators_in_padding_and_in_packed_documents_before_count_for_nothing():
    ids = torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3]])
    tokens = torch.tensor([[9, 9, 1, 9, 1, 1, 9], [1, 9, 9, 1, 1, 9, 1]])
    positions = Positions(ids, torch.tensor([[5], [4]]), token_ids=tokens)
    segment = SeparatedSegments(HierarchicalConfig(separators=(9,)), within=False)(positions)
    within = SeparatedSegments(HierarchicalConfig(separators=(9,)), within=True)(positions)
    assert segment.tolist() == [[-1, -1, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0, 1]]
    assert within.tolist() == [[-1, -1, 0, 1, 0, 1, 2], [0, 1, 0, 0, 1, 2, 0]]


def segments(ids: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    """The segment of each token and its place within, where token 9 ends a segment."""
    positions = Positions(torch.tensor([ids]), torch.tensor([[len(ids)]]), token_ids=torch.tensor([tokens]))
    segment, within = (
        SeparatedSegments(HierarchicalConfig(separators=(9,)), within=within)(positions) for within in (False, True)
    )
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
        assert part.needs_whole_sequence
        assert not part.length_dependent
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            part.check_cache(5, 6)
    for part in build(HierarchicalConfig()):
        assert not part.needs_whole_sequence
        part.check_cache(5, 6)
