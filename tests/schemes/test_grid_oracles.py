"""Schemes on grids equal those of transformers and of their authors."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BeitConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DINOv3ViTConfig,
    LayoutLMv3Config,
    Siglip2VisionConfig,
    ViTConfig,
)
from transformers.models.aimv2.modeling_aimv2 import build_2d_sinusoidal_position_embedding
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersEmbeddings
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.vit.modeling_vit import ViTEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEConfig, ViTMAEEmbeddings
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from hf_posenc.schemes import (
    AlibiConfig,
    AttentionPairs,
    BuildContext,
    LearnedConfig,
    MRopeConfig,
    Positions,
    RopeNdConfig,
    SinusoidalConfig,
    SwinConfig,
    T5Config,
)
from hf_posenc.schemes.rotary.mrope import reset_images
from tests.versions import before, must_have, since

from .coordinate_cases import HEADS, at, map_of, mapped, query_and_key
from .grid_cases import image

HEAD_DIM, ROWS, COLUMNS = 24, 4, 5
LENGTH = ROWS * COLUMNS


def half(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def interleaved(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x * cosine + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sine


BLOCK = RopeNdConfig(10_000.0)
#: The vision towers with rotations that are not tested in `test_coordinate_oracles.py`, each with its options.
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


def axial_config(**options: Any) -> Any:
    given = {"head_dim": HEAD_DIM, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS} | options
    return types.SimpleNamespace(rope_parameters={"rope_type": "axial", "rope_theta": 10_000.0}, **given)


@pytest.mark.parametrize(("model", "name", "rotate", "config"), TOWERS, ids=[row[0] for row in TOWERS])
def test_rotations_equal_the_vision_tower(model, name, rotate, config):
    must_have(model, importlib.util.find_spec(f"transformers.models.{model}") is not None)
    module = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    positions = image(ROWS, COLUMNS)
    query, key = query_and_key(HEAD_DIM, length=LENGTH)
    cosine, sine = module(axial_config())(query, positions.coordinates[:, 0].T)
    part = map_of(config, HEAD_DIM)
    for ours, x in zip(mapped(part, positions, query, key), (query, key), strict=True):
        torch.testing.assert_close(ours, rotate(x, cosine, sine), rtol=0, atol=1e-6)


def test_rotations_over_frames_equal_minimax_m3():
    """Its rotated width is the largest that three axes share evenly."""
    since("5.18", "this tower rotates two axes")
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLVisionRotaryEmbedding

    positions = image(2, 3, 4)
    query, key = query_and_key(20, length=24)
    cosine, sine = MiniMaxM3VLVisionRotaryEmbedding(axial_config(head_dim=20))(query, positions.coordinates[:, 0].T)
    part = map_of(RopeNdConfig(10_000.0, (3, 4), rotary_dim=18), 20)
    for ours, x in zip(mapped(part, positions, query, key), (query, key), strict=True):
        torch.testing.assert_close(ours[..., :18], half(x[..., :18], cosine, sine), rtol=0, atol=1e-6)
        assert torch.equal(ours[..., 18:], x[..., 18:])


def test_pairs_within_the_block_of_an_axis_equal_gemma4():
    positions = image(ROWS, COLUMNS)
    places = positions.coordinates.permute(1, 2, 0)
    query, key = query_and_key(HEAD_DIM, length=LENGTH)
    cosine, sine = gemma4.Gemma4VisionRotaryEmbedding(axial_config())(query, places)
    part = map_of(RopeNdConfig(10_000.0, layout="half_by_axis"), HEAD_DIM)
    for ours, x in zip(mapped(part, positions, query, key), (query, key), strict=True):
        theirs = gemma4.apply_multidimensional_rope(x.transpose(1, 2), cosine, sine, places).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    prepared = part.prepared(part.phases(positions), torch.float32)
    assert torch.equal(part.map_key(key, prepared), part.map_key(key, part.phases(positions)))


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (2, 9)])
def test_normalized_coordinates_equal_dinov3(rows, columns):
    """Also for images that are not square; class and register tokens are not rotated."""
    stock = DINOv3ViTConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, patch_size=2)
    rotary = dinov3.DINOv3ViTRopePositionEmbedding(stock).eval()
    query, key = query_and_key(HEAD_DIM, length=rows * columns + 5)
    expected = dinov3.apply_rotary_pos_emb(query, key, *rotary(torch.zeros(1, 3, rows * 2, columns * 2)))
    part = map_of(RopeNdConfig(coordinates="normalized"), HEAD_DIM)
    for ours, theirs in zip(mapped(part, image(rows, columns, prefix=5), query, key), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
        assert torch.equal(ours[:, :, :5], theirs[:, :, :5])


def test_an_origin_and_columns_first_equal_llama4():
    """Patches are counted from 1, and the class token, which comes last, is at angle 0."""
    stock = llama4.Llama4VisionConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        image_size=20,
        patch_size=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    query, key = query_and_key(HEAD_DIM, length=17)
    rotation = llama4.Llama4VisionRotaryEmbedding(stock)(query)
    expected = llama4.vision_apply_rotary_emb(query.transpose(1, 2), key.transpose(1, 2), rotation)
    patches = image(4, 4)
    coordinates = torch.nn.functional.pad(patches.coordinates, (0, 1))
    ids = torch.arange(17).unsqueeze(0)
    positions = Positions(ids, ids[:, -1:] + 1, coordinates, placed=ids < 16)
    part = map_of(RopeNdConfig(10_000.0, layout="interleaved", origin=1, columns_first=True), HEAD_DIM)
    for ours, theirs in zip(mapped(part, positions, query, key), expected, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=0, atol=1e-6)


#: Six heads, and 24 components: 6 frequencies of an axis.
BIAS_HEADS = 6
VISION = BuildContext(BIAS_HEADS * 4, BIAS_HEADS, 4, causal=False)


def vectors(config: Any, positions: Positions, weight: Tensor | None = None) -> Tensor:
    part = config.build(VISION).additive
    if weight is not None:
        assert part.adopt(weight)
    result: Tensor = part(positions)[0].detach()
    return result


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (9, 2)])
def test_sinusoidal_of_rows_and_columns_equals_transformers(rows, columns):
    expected = build_2d_sinusoidal_position_embedding(rows, columns, 24, cls_token=True)
    ours = vectors(SinusoidalConfig(layout="concatenated", axes=2), image(rows, columns, prefix=1))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_sinusoidal_with_columns_first_equals_mae():
    stock = ViTMAEConfig(
        hidden_size=24, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, image_size=8, patch_size=2
    )
    embeddings = ViTMAEEmbeddings(stock)
    embeddings.initialize_weights()
    expected = embeddings.position_embeddings[0]
    ours = vectors(SinusoidalConfig(layout="concatenated", axes=2, columns_first=True), image(4, 4, prefix=1))
    torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (6, 6), (3, 7), (2, 2)])
@pytest.mark.parametrize(
    ("config_class", "embeddings_class", "options"),
    [
        (ViTConfig, ViTEmbeddings, {}),
        (Dinov2Config, Dinov2Embeddings, {}),
        (Dinov2WithRegistersConfig, Dinov2WithRegistersEmbeddings, {"antialias": True}),
    ],
    ids=["vit", "dinov2", "dinov2_with_registers"],
)
def test_resized_tables_equal_interpolate_pos_encoding(config_class, embeddings_class, options, rows, columns):
    embeddings = embeddings_class(config_class(hidden_size=24, num_attention_heads=2, image_size=8, patch_size=2))
    native = torch.nn.init.normal_(embeddings.position_embeddings)[0].detach()
    length = 1 + rows * columns
    expected = embeddings.interpolate_pos_encoding(torch.zeros(1, length, 24), rows * 2, columns * 2)[0].detach()
    config = LearnedConfig(grid=(4, 4), num_prefix_tokens=1, **options)
    ours = vectors(config, image(rows, columns, prefix=1), native)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_a_table_resized_to_several_grids_of_a_batch_equals_siglip2():
    stock = Siglip2VisionConfig(hidden_size=24, num_attention_heads=2, num_patches=16, patch_size=2)
    embeddings = Siglip2VisionEmbeddings(stock)
    native = torch.nn.init.normal_(embeddings.position_embedding.weight).detach()
    sizes = [(2, 3), (5, 4), (6, 2)]
    expected = embeddings.resize_positional_embeddings(native.view(4, 4, -1), torch.tensor(sizes), max_length=20)
    images = [image(*size) for size in sizes]

    def stacked(tensors: list[Tensor], fill: int) -> Tensor:
        return torch.cat([torch.nn.functional.pad(one, (0, 20 - one.shape[-1]), value=fill) for one in tensors], dim=-2)

    positions = Positions(
        stacked([one.ids for one in images], -1),
        torch.tensor([[6], [20], [12]]),
        stacked([one.coordinates for one in images], 0),
        extents=stacked([one.extents for one in images], 0),
        placed=stacked([one.placed for one in images], False),
    )
    config = LearnedConfig(grid=(4, 4), interpolation="bilinear", antialias=True)
    part = config.build(VISION).additive
    assert part.adopt(native)
    ours = part(positions).detach()
    for row, (size, theirs) in enumerate(zip(sizes, expected, strict=True)):
        count = size[0] * size[1]
        torch.testing.assert_close(ours[row, :count], theirs[:count], rtol=0, atol=1e-6)
        assert not ours[row, count:].any()


def test_a_table_resized_with_its_corners_equals_qwen3_vl():
    native = torch.randn(16, 24)
    indices, weights = get_vision_interpolation_indices_and_weights(torch.tensor([[1, 6, 3]]), 4, align_corners=True)
    expected = (native[indices] * weights[..., None]).sum(1)
    ours = vectors(LearnedConfig(grid=(4, 4), interpolation="bilinear", align_corners=True), image(6, 3), native)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def bias_of(config: Any, positions: Positions, weight: Tensor | None = None) -> Tensor:
    part = config.build(VISION).logit_bias
    if weight is not None:
        assert part.adopt(weight)
    length = positions.ids.shape[-1]
    heads = torch.zeros(1, BIAS_HEADS, length, 4)
    result: Tensor = part(AttentionPairs(heads, heads, torch.arange(length), positions, 0.5))[0].detach()
    return result


def test_a_table_of_displacements_equals_swin():
    module = SwinRelativePositionBias(BIAS_HEADS, (3, 4))
    native = torch.nn.init.normal_(module.relative_position_bias_table).detach()
    assert torch.equal(bias_of(SwinConfig((3, 4)), image(3, 4), native), module()[0])


@pytest.mark.parametrize("size", [(4, 4), (6, 6), (3, 5)])
def test_a_table_with_class_entries_equals_beit(size):
    module = BeitRelativePositionBias(BeitConfig(num_attention_heads=BIAS_HEADS, image_size=8, patch_size=2))
    native = torch.nn.init.normal_(module.relative_position_bias_table).detach()
    expected = module(size)
    ours = bias_of(SwinConfig((4, 4), class_entries=True), image(*size, prefix=1), native)
    torch.testing.assert_close(ours, expected.view_as(ours), rtol=0, atol=1e-6)


def test_a_table_over_frames_is_indexed_as_in_video_swin():
    """Equation of arXiv:2106.13230, section 3.2: one entry for each displacement in time, height and width."""
    size = (2, 3, 4)
    weight = torch.randn(3 * 5 * 7, BIAS_HEADS)
    ours = bias_of(SwinConfig(size), image(*size), weight)
    table = weight.view(3, 5, 7, BIAS_HEADS)
    places = [(t, y, x) for t in range(2) for y in range(3) for x in range(4)]
    for query, key in [(0, 23), (23, 0), (5, 5), (7, 14), (12, 3)]:
        t, y, x = (a - b for a, b in zip(places[query], places[key], strict=True))
        assert torch.equal(ours[:, query, key], table[t + 1, y + 2, x + 3])


def test_the_sum_of_buckets_equals_layoutlmv3():
    """Its first table is for x."""
    stock = LayoutLMv3Config(
        hidden_size=24, num_attention_heads=BIAS_HEADS, num_hidden_layers=1, intermediate_size=8, rel_2d_pos_bins=16,
        max_rel_2d_pos=40, input_size=8, patch_size=4,
    )  # fmt: skip
    encoder = LayoutLMv3Encoder(stock)
    positions = image(3, 7)
    row, column = positions.coordinates[:, 0] * 11
    box = torch.stack((column, row, column, row), dim=-1).unsqueeze(0)
    expected = encoder._cal_2d_pos_emb(box)[0]
    part = T5Config(16, 40, axes=2).build(VISION).logit_bias
    with torch.no_grad():
        part.weight.copy_(torch.stack((encoder.rel_pos_y_bias.weight.T, encoder.rel_pos_x_bias.weight.T)))
    heads = torch.zeros(1, BIAS_HEADS, 21, 4)
    spread = Positions(positions.ids, positions.lengths, positions.coordinates * 11)
    ours = part(AttentionPairs(heads, heads, torch.arange(21), spread, 0.5))[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_distances_in_the_plane_equal_croma():
    """Fixture: `get_2dalibi(num_heads=6, num_patches=9)` of github.com/antofuller/CROMA (use_croma.py), first row."""
    expected = [
        [-0.0, -0.25, -0.5, -0.25, -0.353553, -0.559017, -0.5, -0.559017, -0.707107],
        [-0.0, -0.0625, -0.125, -0.0625, -0.088388, -0.139754, -0.125, -0.139754, -0.176777],
        [-0.0, -0.015625, -0.03125, -0.015625, -0.022097, -0.034939, -0.03125, -0.034939, -0.044194],
        [-0.0, -0.003906, -0.007812, -0.003906, -0.005524, -0.008735, -0.007812, -0.008735, -0.011049],
        [-0.0, -0.5, -1.0, -0.5, -0.707107, -1.118034, -1.0, -1.118034, -1.414214],
        [-0.0, -0.125, -0.25, -0.125, -0.176777, -0.279509, -0.25, -0.279509, -0.353553],
    ]
    ours = bias_of(AlibiConfig(axes=2), image(3, 3))[:, 0]
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=0, atol=1e-6)


#: Fixture: `get_mrope_interleave_index` of github.com/JJJYmmm/Multimodal-RoPEs (pos_design/mrope_i.py) for three tokens
#: of text, then images of 2 x 3, 3 x 2 and 2 x 2 patches, each between a start token and three tokens of text.
TIME = [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9, 10, 11, 11, 11, 11, 11, 11, 14, 15, 16, 17, 18, 18, 18, 18, 20, 21, 22]
STOCK = [
    [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 18, 19, 19, 20, 21, 22],
    [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12, 11, 12, 11, 12, 14, 15, 16, 17, 18, 19, 18, 19, 20, 21, 22],
]
RESET = [
    [0, 1, 2, 3, 0, 0, 0, 1, 1, 1, 7, 8, 9, 10, 0, 0, 1, 1, 2, 2, 14, 15, 16, 17, 0, 0, 1, 1, 20, 21, 22],
    [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 7, 8, 9, 10, 0, 1, 0, 1, 0, 1, 14, 15, 16, 17, 0, 1, 0, 1, 20, 21, 22],
]


def test_the_spatial_reset_is_that_of_the_authors():
    coordinates = torch.tensor([TIME, *STOCK]).unsqueeze(1)
    real = torch.ones(1, len(TIME), dtype=torch.bool)
    assert reset_images(coordinates, real)[:, 0].tolist() == [TIME, *RESET]
    # Left padding has the coordinate 1 on every axis in Qwen-VL.
    padded = torch.nn.functional.pad(coordinates, (3, 0), value=1)
    assert torch.equal(
        reset_images(padded, torch.nn.functional.pad(real, (3, 0)))[..., 3:], reset_images(coordinates, real)
    )


@pytest.mark.parametrize("spatial_reset", [False, True])
def test_heads_of_one_axis_each_equal_the_authors_code(spatial_reset):
    """`MHRopeEmbedding` of github.com/JJJYmmm/Multimodal-RoPEs: 2, 3 and 2 of 8 key heads, and one is not rotated."""
    coordinates = torch.tensor([TIME, *STOCK]).unsqueeze(1)
    config = MRopeConfig(5e6, (2, 3, 2), by_head=True, spatial_reset=spatial_reset)
    place = BuildContext(256, 16, 16, num_key_value_heads=8)
    part = config.build(place).query_key_map
    angles = part.angles(at(coordinates))
    frequencies = 5e6 ** -(torch.arange(8) / 8)
    read = torch.tensor([TIME, *RESET]) if spatial_reset else coordinates[:, 0]
    axis_of_head = [0, 0, 1, 1, 1, 2, 2]
    for head, axis in enumerate(axis_of_head):
        torch.testing.assert_close(angles[0, :, head], read[axis, :, None] * frequencies, rtol=1e-6, atol=1e-6)
    assert not angles[0, :, 7].any()
    # Query heads read the axis of their key head.
    query, key = torch.ones(1, 16, len(TIME), 16), torch.ones(1, 8, len(TIME), 16)
    turned_query, turned_key = mapped(part, at(coordinates), query, key)
    assert torch.equal(turned_query[:, ::2], turned_key)
    assert torch.equal(turned_query[:, 1::2], turned_key)
