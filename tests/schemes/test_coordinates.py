"""Rotations over several axes equal those of transformers and of the authors, and what each axis may change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    LightGlueConfig,
    PixtralVisionConfig,
    Qwen2VLTextConfig,
    Qwen2VLVisionConfig,
    Qwen3VLTextConfig,
)
from transformers.models.lightglue import modeling_lightglue as lightglue
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from hf_posenc.schemes import RopeConfig, SchemeConfig
from hf_posenc.schemes.grids import grid_coordinates
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig
from hf_posenc.schemes.rotary.mrope import MRopeConfig, default_sections
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig, axial_frequencies

from .coordinate_cases import (
    HEAD_DIM,
    HEADS,
    LENGTH,
    WIDTH,
    at,
    context,
    logits_of,
    map_of,
    mapped,
    plain,
    query_and_key,
    scattered,
)

AXIAL = {"rope_type": "axial", "rope_theta": 10_000.0}


def test_split_frequencies_are_bit_equal_to_pixtral():
    stock = PixtralVisionConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, head_dim=HEAD_DIM, rope_parameters=AXIAL
    )
    query, key = query_and_key()
    rows_and_columns = grid_coordinates(plain().ids, (WIDTH,))
    cosine, sine = pixtral.PixtralVisionRotaryEmbedding(stock)(query, rows_and_columns[:, 0].T)
    expected = pixtral.apply_rotary_pos_emb(query, key, cosine.unsqueeze(0), sine.unsqueeze(0))
    part = map_of(RopeNdConfig(10_000.0, (WIDTH,), "split"))
    for ours, theirs in zip(mapped(part, plain(), query, key), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_are_bit_equal_to_the_vision_tower_of_qwen2_vl():
    stock = Qwen2VLVisionConfig(embed_dim=HEADS * HEAD_DIM, num_heads=HEADS)
    stock.num_attention_heads, stock.rope_parameters = HEADS, AXIAL
    query, key = query_and_key()
    rows_and_columns = grid_coordinates(plain().ids, (WIDTH,))
    cosine, sine = qwen2_vl.Qwen2VLVisionRotaryEmbedding(stock)(query, rows_and_columns[:, 0].T)
    expected = qwen2_vl.apply_rotary_pos_emb_vision(query[0].transpose(0, 1), key[0].transpose(0, 1), cosine, sine)
    part = map_of(RopeNdConfig(10_000.0, (WIDTH,), "block"))
    for ours, theirs in zip(mapped(part, plain(), query, key), expected, strict=True):
        assert torch.equal(ours[0].transpose(0, 1), theirs)


def test_mixed_frequencies_equal_lightglue():
    """Its one matrix of frequencies serves all heads, and its coordinates are real numbers."""
    stock = LightGlueConfig(descriptor_dim=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS)
    encoder = lightglue.LightGluePositionalEncoder(stock)
    keypoints = torch.randn(1, LENGTH, 2)
    query, key = query_and_key()
    ((cosine, sine),) = encoder(keypoints)
    expected = lightglue.apply_rotary_pos_emb(query, key, cosine, sine)
    part = map_of(RopeNdConfig(assignment="mixed", per_head=False, layout="interleaved"))
    part.load_state_dict({"frequencies": encoder.projector.weight.T.unsqueeze(1)})
    for ours, theirs in zip(mapped(part, at(keypoints.movedim(-1, 0)), query, key), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("head_dim", "sections"), [(128, (16, 24, 24)), (16, (2, 3, 3)), (16, (4, 4, 0))])
def test_contiguous_sections_are_bit_equal_to_qwen2_vl(head_dim, sections):
    stock = Qwen2VLTextConfig(
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)},
    )
    query, key = query_and_key(head_dim, 2)
    coordinates = scattered(3)
    cosine, sine = qwen2_vl.Qwen2VLRotaryEmbedding(stock)(query, coordinates)
    expected = qwen2_vl.apply_rotary_pos_emb(query, key, cosine, sine)
    part = map_of(MRopeConfig(sections=sections), head_dim, 2)
    for ours, theirs in zip(mapped(part, at(coordinates), query, key), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("head_dim", "sections"), [(128, (24, 20, 20)), (16, (4, 2, 2)), (16, (3, 3, 2))])
def test_interleaved_sections_are_bit_equal_to_qwen3_vl(head_dim, sections):
    stock = Qwen3VLTextConfig(
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections)},
    )
    query, key = query_and_key(head_dim, 2)
    coordinates = scattered(3)
    cosine, sine = qwen3_vl.Qwen3VLTextRotaryEmbedding(stock)(query, coordinates)
    expected = qwen3_vl.apply_rotary_pos_emb(query, key, cosine, sine)
    part = map_of(MRopeConfig(5e6, sections, interleaved=True), head_dim, 2)
    for ours, theirs in zip(mapped(part, at(coordinates), query, key), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_mixed_frequencies_start_as_in_the_official_code():
    """Fixture: `init_random_2d_freqs(dim=8, num_heads=2, theta=10.0)` of github.com/naver-ai/rope-vit
    (deit/models_v2_rope.py) after `torch.manual_seed(0)`, rows x of both heads and y of both heads."""
    expected = [
        [[-0.999723, -0.31614, -0.023518, -0.007437], [0.114241, 0.036126, 0.993453, 0.314157]],
        [[0.023518, 0.007437, -0.999723, -0.31614], [-0.993453, -0.314157, 0.114241, 0.036126]],
    ]
    torch.manual_seed(0)
    part = RopeNdConfig(assignment="mixed").build(context(8, 2)).query_key_map
    torch.testing.assert_close(part.frequencies.detach(), torch.tensor(expected), rtol=0, atol=1e-6)
    assert part.no_weight_decay == {"frequencies"}
    assert part.whole_heads


def test_default_sections_are_the_released_ones_in_proportion():
    assert default_sections(64, interleaved=False) == (16, 24, 24)
    assert default_sections(64, interleaved=True) == (24, 20, 20)
    assert default_sections(4, interleaved=False) == (1, 2, 1)
    assert default_sections(4, interleaved=True) == (2, 1, 1)
    for pairs in range(1, 130):
        for interleaved in (False, True):
            MRopeConfig(interleaved=interleaved).build(context(2 * pairs))


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope_of_text_is_exactly_rope(interleaved):
    query, key = query_and_key()
    rope = mapped(map_of(RopeConfig(theta=1e6)), plain(), query, key)
    part = map_of(MRopeConfig(interleaved=interleaved))
    diagonal = at(plain().ids.expand(3, 1, -1))
    for positions in (plain(), diagonal):
        for ours, theirs in zip(mapped(part, positions, query, key), rope, strict=True):
            assert torch.equal(ours, theirs)


FIXED = [
    RopeNdConfig(),
    RopeNdConfig(10_000.0, (4,), "split", layout="interleaved"),
    RopeNdConfig(50.0, (3, 4), "interleaved"),
    RopeNdConfig(grid=(3, 4), rotary_dim=14),
    MRopeConfig(),
    MRopeConfig(interleaved=True),
]
MIXED = [RopeNdConfig(assignment="mixed"), RopeNdConfig(grid=(3, 4), assignment="mixed", per_head=False)]


def axes_of(config: SchemeConfig) -> int:
    return len(config.grid) + 1 if isinstance(config, RopeNdConfig) else 3


@pytest.mark.parametrize("config", FIXED + MIXED, ids=str)
def test_a_logit_depends_on_coordinate_differences_only(config):
    query, key = query_and_key(key_heads=2)
    coordinates = scattered(axes_of(config))
    shift = torch.tensor([17, 5, 90])[: len(coordinates)].view(-1, 1, 1)
    moved = logits_of(config, at(coordinates + shift), query, key)
    # Angles up to 120 radians in float32.
    torch.testing.assert_close(moved, logits_of(config, at(coordinates), query, key), rtol=0, atol=5e-5)


@pytest.mark.parametrize("config", FIXED, ids=str)
def test_an_axis_changes_the_dimensions_of_its_own_pairs_only(config):
    part = map_of(config)
    coordinates = scattered(axes_of(config))
    _, sine = part.phases(at(coordinates))
    turned_by: list[set[int]] = []
    for axis in range(len(coordinates)):
        other = coordinates.clone()
        other[axis] += 1
        changed = (part.phases(at(other))[1] != sine).any(dim=1)[0]
        turned_by.append(set(changed.nonzero().flatten().tolist()))
    assert all(turned_by)
    assert set.union(*turned_by) == set(range(part.rotary_dim))
    assert sum(map(len, turned_by)) == part.rotary_dim


def test_the_grid_is_filled_row_by_row():
    ids = torch.tensor([[-1, 0, 1, 2, 3, 4, 11, 12]])
    assert grid_coordinates(ids, (3,)).tolist() == [[[0, 0, 0, 0, 1, 1, 3, 4]], [[0, 0, 1, 2, 0, 1, 2, 0]]]
    assert grid_coordinates(ids, (2, 3))[:, 0, -1].tolist() == [2, 0, 0]
    assert grid_coordinates(ids, (2, 3))[:, 0, -2].tolist() == [1, 1, 2]
    assert grid_coordinates(ids, (3,), 1)[:, 0].tolist() == [[0, 0, 0, 0, 0, 1, 3, 3], [0, 0, 0, 1, 2, 0, 1, 2]]


def test_given_coordinates_win_over_the_grid():
    query, key = query_and_key()
    config = RopeNdConfig(grid=(WIDTH,))
    same = at(grid_coordinates(plain().ids, (WIDTH,)))
    assert torch.equal(logits_of(config, same, query, key), logits_of(config, plain(), query, key))
    other = at(grid_coordinates(plain().ids, (WIDTH + 1,)))
    assert (logits_of(config, other, query, key) - logits_of(config, plain(), query, key)).abs().max() > 0.1


@pytest.mark.parametrize("grid", [(4,), (3, 4)])
def test_mixed_frequencies_start_as_axial_ones_turned(grid):
    """A rotation of the axes keeps the length of every pair's direction."""
    part = map_of(RopeNdConfig(grid=grid, assignment="mixed"))
    axial = axial_frequencies(10.0, HEAD_DIM, len(grid) + 1, "block")
    lengths = part.frequencies.detach().norm(dim=0)
    torch.testing.assert_close(lengths, axial.norm(dim=0).expand_as(lengths), rtol=1e-5, atol=1e-6)
    # One rotation for all pairs of a head: angles between directions are those between axes.
    for head in part.frequencies.detach().unbind(1):
        torch.testing.assert_close(head.T @ head, axial.T @ axial, rtol=0, atol=1e-5)
    assert (part.frequencies[:, 0] - part.frequencies[:, 1]).abs().max() > 1e-2


def test_drawn_axes_share_a_draw_and_stay_in_range():
    """Text has equal axes and keeps them equal; an axis that reaches further than positions counts too."""
    part = map_of(RandomizedConfig(MRopeConfig(), max_position=40)).train()
    coordinates = plain().ids.expand(3, 1, -1).clone()
    coordinates[2] += 20
    new = part.position_map.renumber(at(coordinates))
    assert torch.equal(new.coordinates[0], new.ids)
    assert torch.equal(new.coordinates[1], new.ids)
    assert (new.coordinates[2] > new.ids).all()
    assert new.coordinates.min() >= 0
    assert new.coordinates.max() < 40


def test_only_mixed_frequencies_belong_to_a_layer():
    assert RopeNdConfig(assignment="mixed").per_layer
    assert not any(config.per_layer for config in FIXED)
    assert dataclasses.replace(RopeNdConfig(), grid=[4]).grid == (4,)
