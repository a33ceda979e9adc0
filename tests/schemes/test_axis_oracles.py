"""Schemes over several axes equal those of transformers and of their authors."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import types
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.aimv2.modeling_aimv2 import build_2d_sinusoidal_position_embedding
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder
from transformers.models.lightglue import modeling_lightglue as lightglue
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings

from hf_posenc.schemes import (
    AlibiConfig,
    MRopeConfig,
    RopeNdConfig,
    SinusoidalConfig,
    T5Config,
)
from hf_posenc.schemes.rotary.mrope import reset_images
from tests.versions import before, must_have

from .building import image, mapped, pairs_at, part_of, placed_at, random_heads
from .table.row import HEADS, HIDDEN

ROWS, COLUMNS = 4, 5
PLACES = image(ROWS, COLUMNS)
AXIAL = {"rope_type": "axial", "rope_theta": 10_000.0}


def half(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def interleaved(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x * cosine + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sine


def axial_config(head_dim: int = 24) -> Any:
    return types.SimpleNamespace(
        rope_parameters=AXIAL, head_dim=head_dim, hidden_size=HEADS * head_dim, num_attention_heads=HEADS
    )


BLOCK = RopeNdConfig(10_000.0)
#: The vision towers with rotations, each with its options.
TOWERS = [
    ("glm4v", "Glm4vVisionRotaryEmbedding", half, BLOCK),
    ("sam3", "Sam3ViTRotaryEmbedding", interleaved, RopeNdConfig(10_000.0, layout="interleaved")),
    ("muse_spark", "MuseSparkVisionRotaryEmbedding", half, BLOCK),
    # Before transformers 5.23, its rows come first.
    ("step3p7", "Step3p7VisionRotaryEmbedding", half, dataclasses.replace(BLOCK, columns_first=not before("5.23"))),
    ("inkling2", "Inkling2VisionRotaryEmbedding", interleaved,
     dataclasses.replace(BLOCK, columns_first=True, layout="interleaved")),
    ("kimi_k25", "Kimi_K25VisionRotaryEmbedding", half,
     dataclasses.replace(BLOCK, assignment="alternating", columns_first=True)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name", "rotate", "config"), TOWERS, ids=[row[0] for row in TOWERS])
def test_rotations_equal_the_vision_tower(model: str, name: str, rotate: Any, config: RopeNdConfig) -> None:
    must_have(model, importlib.util.find_spec(f"transformers.models.{model}") is not None)
    module = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    heads = random_heads(ROWS * COLUMNS, head_dim=24)
    cosine, sine = module(axial_config())(heads[0], PLACES.coordinates[:, 0].T)
    for ours, x in zip(mapped(part_of(config, head_dim=24), PLACES, heads), heads, strict=True):
        torch.testing.assert_close(ours, rotate(x, cosine, sine), rtol=0, atol=1e-6)


def test_axes_in_blocks_of_the_head_equal_gemma4() -> None:
    heads, places = random_heads(ROWS * COLUMNS, head_dim=24), PLACES.coordinates.permute(1, 2, 0)
    cosine, sine = gemma4.Gemma4VisionRotaryEmbedding(axial_config())(heads[0], places)
    part = part_of(RopeNdConfig(10_000.0, layout="half_by_axis"), head_dim=24)
    for ours, x in zip(mapped(part, PLACES, heads), heads, strict=True):
        theirs = gemma4.apply_multidimensional_rope(x.transpose(1, 2), cosine, sine, places).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_mixed_frequencies_equal_lightglue() -> None:
    """Its one matrix of frequencies serves all heads, and its coordinates are real numbers."""
    stock = transformers.LightGlueConfig(
        descriptor_dim=HEADS * 24, num_attention_heads=HEADS, num_key_value_heads=HEADS
    )
    encoder, keypoints = lightglue.LightGluePositionalEncoder(stock), torch.randn(1, 20, 2)
    heads = random_heads(20, head_dim=24)
    ((cosine, sine),) = encoder(keypoints)
    part = part_of(RopeNdConfig(assignment="mixed", per_head=False, layout="interleaved"), head_dim=24)
    part.load_state_dict({"frequencies": encoder.projector.weight.T.unsqueeze(1)})
    for ours, x in zip(mapped(part, placed_at(keypoints.movedim(-1, 0)), heads), heads, strict=True):
        theirs = lightglue.apply_rotary_pos_emb(x, x, cosine, sine)[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_mixed_frequencies_start_as_in_the_official_code() -> None:
    """Fixture: `init_random_2d_freqs(dim=8, num_heads=2, theta=10.0)` of github.com/naver-ai/rope-vit
    (deit/models_v2_rope.py) after `torch.manual_seed(0)`, rows x of both heads and y of both heads."""
    expected = [
        [[-0.999723, -0.31614, -0.023518, -0.007437], [0.114241, 0.036126, 0.993453, 0.314157]],
        [[0.023518, 0.007437, -0.999723, -0.31614], [-0.993453, -0.314157, 0.114241, 0.036126]],
    ]
    part = part_of(RopeNdConfig(assignment="mixed"), head_dim=8, num_heads=2, num_key_value_heads=2)
    torch.testing.assert_close(part.frequencies.detach(), torch.tensor(expected), rtol=0, atol=1e-6)
    assert part.whole_heads


#: 24 components: 6 frequencies of an axis.
VISION = {"causal": False, "head_dim": 4}
STOCK = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 8}


def computed(config: Any, given: Any, weight: Tensor | None = None) -> Tensor:
    """Vectors of positions, or a bias of pairs."""
    part = part_of(config, **VISION)
    assert weight is None or part.adopt(weight)
    result: Tensor = part(given)[0].detach()
    return result


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (9, 2)])
def test_sinusoidal_of_rows_and_columns_equals_transformers(rows: int, columns: int) -> None:
    expected = build_2d_sinusoidal_position_embedding(rows, columns, 24, cls_token=True)
    ours = computed(SinusoidalConfig(layout="concatenated", axes=2), image(rows, columns, prefix=1))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_sinusoidal_with_columns_first_equals_mae() -> None:
    embeddings = ViTMAEEmbeddings(transformers.ViTMAEConfig(**STOCK, image_size=8, patch_size=2))
    embeddings.initialize_weights()
    ours = computed(SinusoidalConfig(layout="concatenated", axes=2, columns_first=True), image(4, 4, prefix=1))
    torch.testing.assert_close(ours, embeddings.position_embeddings[0].detach(), rtol=0, atol=1e-6)


def test_the_sum_of_buckets_equals_layoutlmv3() -> None:
    """Its first table is for x."""
    stock = transformers.LayoutLMv3Config(**STOCK, rel_2d_pos_bins=16, max_rel_2d_pos=40, input_size=8, patch_size=4)
    encoder = LayoutLMv3Encoder(stock)
    spread = placed_at(image(3, 7).coordinates * 11)
    row, column = spread.coordinates[:, 0]
    expected = encoder._cal_2d_pos_emb(torch.stack((column, row, column, row), dim=-1).unsqueeze(0))[0]
    weight = torch.stack((encoder.rel_pos_y_bias.weight.T, encoder.rel_pos_x_bias.weight.T)).detach()
    part = part_of(T5Config(16, 40, axes=2), **VISION)
    part.load_state_dict({"weight": weight})
    torch.testing.assert_close(part(pairs_at(spread))[0], expected, rtol=0, atol=1e-6)


def test_distances_in_the_plane_equal_croma() -> None:
    """Fixture: `get_2dalibi(num_heads=6, num_patches=9)` of github.com/antofuller/CROMA (use_croma.py): the first row
    of two heads. The table has the slopes of all.
    """
    expected = [
        [-0.0, -0.25, -0.5, -0.25, -0.353553, -0.559017, -0.5, -0.559017, -0.707107],
        [-0.0, -0.5, -1.0, -0.5, -0.707107, -1.118034, -1.0, -1.118034, -1.414214],
    ]
    ours = computed(AlibiConfig(axes=2), pairs_at(image(3, 3)))[[0, 4], 0]
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=0, atol=1e-6)


#: Fixture: `get_mrope_interleave_index` of github.com/JJJYmmm/Multimodal-RoPEs (pos_design/mrope_i.py) for three tokens
#: of text, then images of 2 x 3, 3 x 2 and 2 x 2 patches, each between a start token and three tokens of text.
TIME = [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9, 10, 11, 11, 11, 11, 11, 11, 14, 15, 16, 17, 18, 18, 18, 18, 20, 21, 22]
COUNTED = [
    [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 18, 19, 19, 20, 21, 22],
    [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12, 11, 12, 11, 12, 14, 15, 16, 17, 18, 19, 18, 19, 20, 21, 22],
]
RESET = [
    [0, 1, 2, 3, 0, 0, 0, 1, 1, 1, 7, 8, 9, 10, 0, 0, 1, 1, 2, 2, 14, 15, 16, 17, 0, 0, 1, 1, 20, 21, 22],
    [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 7, 8, 9, 10, 0, 1, 0, 1, 0, 1, 14, 15, 16, 17, 0, 1, 0, 1, 20, 21, 22],
]


def test_the_spatial_reset_is_that_of_the_authors() -> None:
    coordinates = torch.tensor([TIME, *COUNTED]).unsqueeze(1)
    real = torch.ones(1, len(TIME), dtype=torch.bool)
    assert reset_images(coordinates, real)[:, 0].tolist() == [TIME, *RESET]
    # Left padding has the coordinate 1 on every axis in Qwen-VL.
    padded = torch.nn.functional.pad(coordinates, (3, 0), value=1)
    assert torch.equal(
        reset_images(padded, torch.nn.functional.pad(real, (3, 0)))[..., 3:], reset_images(coordinates, real)
    )


@pytest.mark.parametrize("spatial_reset", [False, True])
def test_heads_of_one_axis_each_equal_the_authors_code(spatial_reset: bool) -> None:
    """`MHRopeEmbedding` of github.com/JJJYmmm/Multimodal-RoPEs: 2, 3 and 2 of 8 key heads, and one is not rotated."""
    coordinates = torch.tensor([TIME, *COUNTED]).unsqueeze(1)
    config = MRopeConfig(5e6, (2, 3, 2), by_head=True, spatial_reset=spatial_reset)
    part = part_of(config, num_heads=16, num_key_value_heads=8)
    angles = part.angles(placed_at(coordinates))
    frequencies = 5e6 ** -(torch.arange(8) / 8)
    read = torch.tensor([TIME, *RESET]) if spatial_reset else coordinates[:, 0]
    axis_of_head = [0, 0, 1, 1, 1, 2, 2]
    for head, axis in enumerate(axis_of_head):
        torch.testing.assert_close(angles[0, :, head], read[axis, :, None] * frequencies, rtol=1e-6, atol=1e-6)
    assert not angles[0, :, 7].any()
    # Query heads read the axis of their key head.
    query, key = torch.ones(1, 16, len(TIME), 16), torch.ones(1, 8, len(TIME), 16)
    turned_query, turned_key = mapped(part, placed_at(coordinates), (query, key))
    assert torch.equal(turned_query[:, ::2], turned_key)
    assert torch.equal(turned_query[:, 1::2], turned_key)
