"""Schemes over several axes equal those of transformers and of their authors."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.aimv2.modeling_aimv2 import build_2d_sinusoidal_position_embedding
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersEmbeddings
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder
from transformers.models.lightglue import modeling_lightglue as lightglue
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.vit.modeling_vit import ViTEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from hf_posenc.schemes import (
    AlibiConfig,
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

from .building import counted, image, mapped, pairs_at, part_of, placed_at, random_heads
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


def test_rotations_over_frames_equal_minimax_m3() -> None:
    """Its rotated width is the largest that three axes share evenly."""
    since("5.18", "this tower rotates two axes")
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLVisionRotaryEmbedding

    positions, heads = image(2, 3, 4), random_heads(24, head_dim=20)
    cosine, sine = MiniMaxM3VLVisionRotaryEmbedding(axial_config(20))(heads[0], positions.coordinates[:, 0].T)
    part = part_of(RopeNdConfig(10_000.0, (3, 4), rotary_dim=18), head_dim=20)
    for ours, x in zip(mapped(part, positions, heads), heads, strict=True):
        torch.testing.assert_close(ours[..., :18], half(x[..., :18], cosine, sine), rtol=0, atol=1e-6)
        assert torch.equal(ours[..., 18:], x[..., 18:])


#: A scheme, tokens, what stock makes of queries and keys, and how close it is.
Rotation = tuple[Any, Positions, tuple[Tensor, Tensor], float]


def pixtral_split(query: Tensor, key: Tensor) -> Rotation:
    stock = transformers.PixtralVisionConfig(
        hidden_size=HEADS * 24, num_attention_heads=HEADS, head_dim=24, rope_parameters=AXIAL
    )
    cosine, sine = pixtral.PixtralVisionRotaryEmbedding(stock)(query, PLACES.coordinates[:, 0].T)
    turned = pixtral.apply_rotary_pos_emb(query, key, cosine.unsqueeze(0), sine.unsqueeze(0))
    return RopeNdConfig(10_000.0, (COLUMNS,), "split"), counted(ROWS * COLUMNS), turned, 0


def qwen2_vl_blocks(query: Tensor, key: Tensor) -> Rotation:
    stock = transformers.Qwen2VLVisionConfig(embed_dim=HEADS * 24, num_heads=HEADS)
    stock.num_attention_heads, stock.rope_parameters = HEADS, AXIAL
    rotation = qwen2_vl.Qwen2VLVisionRotaryEmbedding(stock)(query, PLACES.coordinates[:, 0].T)
    turned = qwen2_vl.apply_rotary_pos_emb_vision(query[0].transpose(0, 1), key[0].transpose(0, 1), *rotation)
    queries, keys = (x.transpose(0, 1).unsqueeze(0) for x in turned)
    return RopeNdConfig(10_000.0, (COLUMNS,), "block"), counted(ROWS * COLUMNS), (queries, keys), 0


def gemma4_blocks(query: Tensor, key: Tensor) -> Rotation:
    places = PLACES.coordinates.permute(1, 2, 0)
    cosine, sine = gemma4.Gemma4VisionRotaryEmbedding(axial_config())(query, places)
    queries, keys = (
        gemma4.apply_multidimensional_rope(x.transpose(1, 2), cosine, sine, places).transpose(1, 2)
        for x in (query, key)
    )
    return RopeNdConfig(10_000.0, layout="half_by_axis"), PLACES, (queries, keys), 1e-6


def dinov3_normalized(rows: int, columns: int) -> Callable[..., Rotation]:
    """Also images that are not square; class and register tokens are not rotated."""

    def rotation(query: Tensor, key: Tensor) -> Rotation:
        stock = transformers.DINOv3ViTConfig(hidden_size=HEADS * 24, num_attention_heads=HEADS, patch_size=2)
        rotary = dinov3.DINOv3ViTRopePositionEmbedding(stock).eval()
        turned = dinov3.apply_rotary_pos_emb(query, key, *rotary(torch.zeros(1, 3, rows * 2, columns * 2)))
        assert torch.equal(turned[0][:, :, :5], query[:, :, :5])
        return RopeNdConfig(coordinates="normalized"), image(rows, columns, prefix=5), turned, 2e-6

    return rotation


def llama4_origin(query: Tensor, key: Tensor) -> Rotation:
    """Patches are counted from 1, columns first, and the class token, which comes last, is at angle 0."""
    stock = llama4.Llama4VisionConfig(
        hidden_size=HEADS * 24,
        num_attention_heads=HEADS,
        image_size=20,
        patch_size=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    rotation = llama4.Llama4VisionRotaryEmbedding(stock)(query)
    turned = llama4.vision_apply_rotary_emb(query.transpose(1, 2), key.transpose(1, 2), rotation)
    queries, keys = (x.transpose(1, 2) for x in turned)
    tokens = placed_at(torch.nn.functional.pad(image(4, 4).coordinates, (0, 1)))
    positions = dataclasses.replace(tokens, placed=tokens.ids < 16)
    config = RopeNdConfig(10_000.0, layout="interleaved", origin=1, columns_first=True)
    return config, positions, (queries, keys), 1e-6


def qwen_sections(version: int, head_dim: int, sections: tuple[int, ...]) -> Callable[..., Rotation]:
    """Sections of three axes, contiguous in Qwen2-VL and interleaved in Qwen3-VL."""
    coordinates = torch.randint(0, 30, (3, 1, 20), generator=torch.Generator().manual_seed(3))
    theta = {2: 1e6, 3: 5e6}[version]
    modeling: Any = {2: qwen2_vl, 3: qwen3_vl}[version]

    def rotation(query: Tensor, key: Tensor) -> Rotation:
        stock = getattr(transformers, f"Qwen{version}VLTextConfig")(
            hidden_size=HEADS * head_dim,
            num_attention_heads=HEADS,
            num_key_value_heads=3,
            head_dim=head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": theta, "mrope_section": list(sections)},
        )
        rotary = modeling.Qwen2VLRotaryEmbedding if version == 2 else modeling.Qwen3VLTextRotaryEmbedding
        turned = modeling.apply_rotary_pos_emb(query, key, *rotary(stock)(query, coordinates))
        return MRopeConfig(theta, sections, interleaved=version == 3), placed_at(coordinates), turned, 0

    return rotation


ROTATIONS: dict[str, tuple[Callable[..., Rotation], int, int]] = {
    "pixtral": (pixtral_split, 20, 24),
    "qwen2_vl vision": (qwen2_vl_blocks, 20, 24),
    "gemma4": (gemma4_blocks, 20, 24),
    "dinov3": (dinov3_normalized(4, 5), 25, 24),
    "dinov3 wide": (dinov3_normalized(2, 9), 23, 24),
    "llama4": (llama4_origin, 17, 24),
} | {
    f"qwen{version}_vl {sections}": (qwen_sections(version, head_dim, sections), 20, head_dim)
    for version, head_dim, sections in (
        (2, 128, (16, 24, 24)),
        (2, 16, (2, 3, 3)),
        (2, 16, (4, 4, 0)),
        (3, 128, (24, 20, 20)),
        (3, 16, (4, 2, 2)),
        (3, 16, (3, 3, 2)),
    )
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_equal_transformers(name: str) -> None:
    stock, length, head_dim = ROTATIONS[name]
    heads = random_heads(length, head_dim=head_dim)
    config, positions, expected, close = stock(*heads)
    part = part_of(config, head_dim=head_dim)
    for ours, theirs in zip(mapped(part, positions, heads), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=close)
    prepared = part.prepared(part.phases(positions), torch.float32)
    assert torch.equal(part.map_key(heads[1], prepared), mapped(part, positions, heads)[1])


def test_mixed_frequencies_equal_lightglue() -> None:
    """Its one matrix of frequencies serves all heads, and its coordinates are real numbers."""
    stock = transformers.LightGlueConfig(
        descriptor_dim=HEADS * 24, num_attention_heads=HEADS, num_key_value_heads=HEADS
    )
    encoder, keypoints, heads = (
        lightglue.LightGluePositionalEncoder(stock),
        torch.randn(1, 20, 2),
        random_heads(20, head_dim=24),
    )
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


def vectors(config: Any, positions: Positions, weight: Tensor | None = None) -> Tensor:
    part = part_of(config, **VISION)
    assert weight is None or part.adopt(weight)
    result: Tensor = part(positions)[0].detach()
    return result


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (9, 2)])
def test_sinusoidal_of_rows_and_columns_equals_transformers(rows: int, columns: int) -> None:
    expected = build_2d_sinusoidal_position_embedding(rows, columns, 24, cls_token=True)
    ours = vectors(SinusoidalConfig(layout="concatenated", axes=2), image(rows, columns, prefix=1))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_sinusoidal_with_columns_first_equals_mae() -> None:
    embeddings = ViTMAEEmbeddings(transformers.ViTMAEConfig(**STOCK, image_size=8, patch_size=2))
    embeddings.initialize_weights()
    ours = vectors(SinusoidalConfig(layout="concatenated", axes=2, columns_first=True), image(4, 4, prefix=1))
    torch.testing.assert_close(ours, embeddings.position_embeddings[0].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (6, 6), (3, 7), (2, 2)])
@pytest.mark.parametrize(
    ("config_class", "embeddings_class", "options"),
    [
        (transformers.ViTConfig, ViTEmbeddings, {}),
        (transformers.Dinov2Config, Dinov2Embeddings, {}),
        (transformers.Dinov2WithRegistersConfig, Dinov2WithRegistersEmbeddings, {"antialias": True}),
    ],
    ids=["vit", "dinov2", "dinov2_with_registers"],
)
def test_resized_tables_equal_interpolate_pos_encoding(
    config_class: Any, embeddings_class: Any, options: dict[str, Any], rows: int, columns: int
) -> None:
    embeddings = embeddings_class(config_class(hidden_size=24, num_attention_heads=2, image_size=8, patch_size=2))
    native = torch.nn.init.normal_(embeddings.position_embeddings)[0].detach()
    tokens = torch.zeros(1, 1 + rows * columns, 24)
    expected = embeddings.interpolate_pos_encoding(tokens, rows * 2, columns * 2)[0].detach()
    config = LearnedConfig(grid=(4, 4), num_prefix_tokens=1, **options)
    ours = vectors(config, image(rows, columns, prefix=1), native)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_a_table_resized_to_several_grids_of_a_batch_equals_siglip2() -> None:
    stock = transformers.Siglip2VisionConfig(hidden_size=24, num_attention_heads=2, num_patches=16, patch_size=2)
    embeddings = Siglip2VisionEmbeddings(stock)
    native = torch.nn.init.normal_(embeddings.position_embedding.weight).detach()
    sizes = [(2, 3), (5, 4), (6, 2)]
    expected = embeddings.resize_positional_embeddings(native.view(4, 4, -1), torch.tensor(sizes), max_length=20)
    images = [image(*size) for size in sizes]

    def stacked(tensors: list[Any], fill: int) -> Tensor:
        return torch.cat(
            [torch.nn.functional.pad(tensor, (0, 20 - tensor.shape[-1]), value=fill) for tensor in tensors], dim=-2
        )

    positions = Positions(
        stacked([tokens.ids for tokens in images], -1),
        torch.tensor([[6], [20], [12]]),
        stacked([tokens.coordinates for tokens in images], 0),
        extents=stacked([tokens.extents for tokens in images], 0),
        placed=stacked([tokens.placed for tokens in images], False),
    )
    part = part_of(LearnedConfig(grid=(4, 4), interpolation="bilinear", antialias=True), **VISION)
    assert part.adopt(native)
    ours = part(positions).detach()
    for row, (size, theirs) in enumerate(zip(sizes, expected, strict=True)):
        count = size[0] * size[1]
        torch.testing.assert_close(ours[row, :count], theirs[:count], rtol=0, atol=1e-6)
        assert not ours[row, count:].any()


def test_a_table_resized_with_its_corners_equals_qwen3_vl() -> None:
    native = torch.randn(16, 24)
    indices, weights = get_vision_interpolation_indices_and_weights(torch.tensor([[1, 6, 3]]), 4, align_corners=True)
    expected = (native[indices] * weights[..., None]).sum(1)
    ours = vectors(LearnedConfig(grid=(4, 4), interpolation="bilinear", align_corners=True), image(6, 3), native)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def bias_of(config: Any, positions: Positions, weight: Tensor | None = None) -> Tensor:
    part = part_of(config, **VISION)
    assert weight is None or part.adopt(weight)
    result: Tensor = part(pairs_at(positions))[0].detach()
    return result


def test_a_table_of_displacements_equals_swin() -> None:
    module = SwinRelativePositionBias(HEADS, (3, 4))
    native = torch.nn.init.normal_(module.relative_position_bias_table).detach()
    assert torch.equal(bias_of(SwinConfig((3, 4)), image(3, 4), native), module()[0])


@pytest.mark.parametrize("size", [(4, 4), (6, 6), (3, 5)])
def test_a_table_with_class_entries_equals_beit(size: tuple[int, int]) -> None:
    stock = transformers.BeitConfig(num_attention_heads=HEADS, image_size=8, patch_size=2)
    module = BeitRelativePositionBias(stock)
    native = torch.nn.init.normal_(module.relative_position_bias_table).detach()
    ours = bias_of(SwinConfig((4, 4), class_entries=True), image(*size, prefix=1), native)
    torch.testing.assert_close(ours, module(size).view_as(ours), rtol=0, atol=1e-6)


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
