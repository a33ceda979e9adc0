"""Rotations over several axes equal those of transformers and of the authors."""

from __future__ import annotations

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

from hf_posenc.schemes.grids import grid_coordinates
from hf_posenc.schemes.rotary.mrope import MRopeConfig
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig

from .coordinate_cases import (
    HEAD_DIM,
    HEADS,
    LENGTH,
    WIDTH,
    at,
    context,
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
