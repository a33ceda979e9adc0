"""A ViT: a table that is a parameter, a class token, and patches with places."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from hf_posenc import (
    LearnedConfig,
    SinusoidalConfig,
    UnsupportedError,
    inspect_model,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*numbered row by row")

PATCH = 4
SCHEMES = ("none", "learned", "sinusoidal", "alibi", "rope", "rope_nd", "t5")


def vit(**options: Any) -> ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = ViTConfig(**sizes, image_size=4 * PATCH, patch_size=PATCH, num_labels=5, **options)
    model = ViTForImageClassification(config).eval()
    # Larger weights, so that attention is not uniform and positions matter.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture
def model() -> ViTForImageClassification:
    return vit()


def test_a_scheme_for_the_order_of_tokens_is_placed_with_a_warning(model: ViTForImageClassification) -> None:
    with pytest.warns(UserWarning, match="numbered row by row.*rope_nd.*axes=2"):
        patch_model(model, "alibi")
    assert "row by row for the bias" in str(model.position_encoding.report)
    for scheme, options in (("rope_nd", {}), ("alibi", {"axes": 2}), ("none", {}), ("native", {})):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            patch_model(model, scheme, **options)
        assert "row by row" not in str(model.position_encoding.report)
    patch_model(model, "rope_nd")
    assert "rows and columns of patches" in str(model.position_encoding.report)


def test_inspection_lists_the_table_over_the_patches(model: ViTForImageClassification) -> None:
    found = inspect_model(model)
    (table,) = found.stacks[0].tables
    weight = model.vit.embeddings.position_embeddings
    assert "embeddings.position_embeddings" in table
    assert f"{weight.shape[1]} x {weight.shape[2]}, over the patches, first patch in row 1" in table
    assert "tokens" not in found.context
    assert "patches at the image size" in found.context


def test_embeddings_that_were_exchanged_after_the_patch_are_noticed(model: ViTForImageClassification) -> None:
    patch_model(model, "rope_nd")
    tokens(model, image())
    model.vit.embeddings = vit().vit.embeddings
    with pytest.raises(UnsupportedError, match=r"embeddings.*has no position encoding"):
        tokens(model, image())


def test_a_scheme_for_videos_is_refused_with_the_number_of_axes(model: ViTForImageClassification) -> None:
    for scheme, options in (("rope_nd", {"grid": (4, 4)}), ("mrope", {}), ("alibi", {"axes": 3})):
        with pytest.raises(UnsupportedError, match=r"2 axes.*built for 3"):
            patch_model(model, scheme, **options)


def image(rows: int = 4, columns: int = 4) -> Tensor:
    return torch.randn(2, 3, rows * PATCH, columns * PATCH, generator=torch.Generator().manual_seed(1))


def permuted(pixels: Tensor, order: Tensor) -> Tensor:
    """The image with its patches in another order."""
    batch, channels, height, width = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    patches = pixels.reshape(batch, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(batch, rows * columns, channels, PATCH, PATCH)[:, order]
    patches = patches.reshape(batch, rows, columns, channels, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels, height, width)


@torch.no_grad()
def tokens(model: ViTForImageClassification, pixels: Tensor, **options: Any) -> Tensor:
    hidden: Tensor = model.vit(pixels, **options).last_hidden_state
    return hidden


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_differs_from_none_and_undo_restores_the_stock_model(
    model: ViTForImageClassification, scheme: str
) -> None:
    stock = tokens(model, image())
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    patch_model(model, "none")
    without = tokens(model, image())
    patch_model(model, scheme)
    found = tokens(model, image())
    assert torch.equal(found, without) == (scheme == "none")
    assert torch.allclose(found, stock, atol=1e-5) == (scheme == "learned")  # The rows of the table are taken over.
    unpatch_model(model)
    assert torch.equal(tokens(model, image()), stock)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_without_positions_permuted_patches_permute_the_output(model: ViTForImageClassification) -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    patch_model(model, "none")
    before, after = tokens(model, image()), tokens(model, permuted(image(), order))
    assert torch.allclose(before[:, 1:][:, order], after[:, 1:], atol=1e-5)
    assert torch.allclose(before[:, 0], after[:, 0], atol=1e-5)
    patch_model(model, "rope_nd")
    before, after = tokens(model, image()), tokens(model, permuted(image(), order))
    assert not torch.allclose(before[:, 1:][:, order], after[:, 1:], atol=1e-3)


def test_rope_nd_reads_rows_and_columns_of_every_resolution(model: ViTForImageClassification) -> None:
    patch_model(model, "rope_nd", grid=(14,))
    rotary = model.position_encoding.parts()[0]
    seen = []
    original = type(rotary).coordinates

    def coordinates(positions: Any) -> Any:
        found = original(rotary, positions)
        seen.append((found[0], positions))
        return found

    rotary.coordinates = coordinates
    tokens(model, image(3, 5), interpolate_pos_encoding=True)
    (found, positions), *_ = seen
    assert positions.coordinates[:, 0, 0].tolist() == [0, 0]
    assert found[0, 0, 1:].tolist() == [row for row in range(3) for _ in range(5)]
    assert found[1, 0, 1:].tolist() == [column for _ in range(3) for column in range(5)]
    assert positions.placed[0].tolist() == [False] + 15 * [True]
    assert positions.extents[:, 0, 3].tolist() == [3, 5]
    assert positions.ids[0].tolist() == list(range(16))


def test_native_is_the_stock_model(model: ViTForImageClassification) -> None:
    stock = tokens(model, image())
    patch_model(model, native_scheme(model))
    assert torch.allclose(tokens(model, image()), stock, atol=1e-5)


@pytest.mark.parametrize("scheme", ["learned", "rope_nd", "alibi"])
def test_reload(model: ViTForImageClassification, scheme: str, tmp_path: Path) -> None:
    patch_model(model, scheme)
    expected = tokens(model, image())
    model.save_pretrained(tmp_path)
    loaded = ViTForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(tokens(loaded, image()), expected)
    assert loaded.position_encoding.config == model.position_encoding.config


def test_copies_and_pickles_have_their_own_scheme(model: ViTForImageClassification) -> None:
    patch_model(model, "sinusoidal")
    expected = tokens(model, image())
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    unpatch_model(model)
    for other in copies:
        assert torch.equal(tokens(other, image()), expected)
        view = other.vit.embeddings.forward.view
        assert view.cls_token is other.vit.embeddings.cls_token


@pytest.mark.parametrize("scheme", ["sinusoidal", "rope_nd", "alibi"])
def test_eager_attention_equals_sdpa(scheme: str) -> None:
    outputs = []
    for implementation in ("eager", "sdpa"):
        model = vit(attn_implementation=implementation)
        outputs.append(tokens(patch_model(model, scheme), image()))
    assert torch.allclose(*outputs, atol=1e-4)


@pytest.mark.parametrize("scheme", ["learned", "rope_nd", "alibi"])
def test_gradient_checkpointing(scheme: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = patch_model(vit(), scheme).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(image(), labels=torch.tensor([1, 2])).loss.backward()
        gradients.append([one.grad for one in model.parameters() if one.grad is not None])
        if scheme == "learned":
            assert any(
                one.grad is not None and one.grad.abs().max() > 0 for one in model.position_encoding.parameters()
            )
    assert len(gradients[0]) == len(gradients[1])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "rope_nd", "alibi"])
def test_compiled(scheme: str) -> None:
    model = patch_model(vit(), scheme)
    expected = tokens(model, image())
    torch._dynamo.reset()
    compiled = torch.compile(model.vit, fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(image()).last_hidden_state, expected, atol=1e-4)


@pytest.mark.slow
def test_reload_in_a_fresh_process(model: ViTForImageClassification, tmp_path: Path) -> None:
    patch_model(model, "rope_nd", assignment="mixed")
    expected = tokens(model, image())
    model.save_pretrained(tmp_path)
    torch.save({"pixels": image(), "expected": expected}, tmp_path / "example.pt")
    script = (
        "import sys, torch, hf_posenc; from transformers import AutoModelForImageClassification as Auto\n"
        "model = Auto.from_pretrained(sys.argv[1]).eval(); example = torch.load(sys.argv[1] + '/example.pt')\n"
        "with torch.no_grad(): found = model.vit(example['pixels']).last_hidden_state\n"
        "assert torch.allclose(found, example['expected'], atol=1e-6), (found - example['expected']).abs().max()"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_bfloat16() -> None:
    model = patch_model(vit(), "rope_nd").to(torch.bfloat16)
    whole = patch_model(vit(), "rope_nd")
    found, expected = tokens(model, image().bfloat16()), tokens(whole, image())
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_a_grid_scheme_where_tokens_have_one_axis_is_pointed_out() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, vocab_size=50))
    for scheme, options in (("rope_nd", {}), ("swin", {}), ("alibi", {"axes": 2})):
        with pytest.warns(UserWarning, match="reads rows and columns, but the tokens of the text part have one axis"):
            patch_model(model, scheme, **options)
    with pytest.raises(ValueError, match="no coordinates"):
        model(torch.arange(5).unsqueeze(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, "rope_nd", grid=(8,))


def test_the_mask_decoder_of_sam_is_left_alone() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    small = vision | {"output_channels": 16, "mlp_dim": 32, "window_size": 2, "global_attn_indexes": [0]}
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4}
    mask = {
        "hidden_size": 16,
        "mlp_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": 8,
    }
    config = transformers.SamConfig(vision_config=small, prompt_encoder_config=prompt, mask_decoder_config=mask)
    model = patch_model(transformers.SamModel(config), "rope_nd")
    assert {stack.part for stack in model.position_encoding.report.stacks} == {"vision"}
    assert all("mask_decoder" not in name for stack in model.position_encoding.report.stacks for name in stack.placed)


FAMILIES = ["vit", "clip_vision_model", "siglip_vision_model", "deit", "vit_mae", "yolos", "ijepa"]


@pytest.mark.parametrize("scheme", ["none", "rope_nd", "sinusoidal"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:The order of tokens is read")
@torch.no_grad()
def test_pictures_of_other_sizes_without_the_discarded_table(name: str, scheme: str) -> None:
    """Stock models refuse them, unless they are told to interpolate their tables."""
    model = tiny_model(pair_named(f"vision-{name}"))
    patch_model(model, SinusoidalConfig(axes=2) if scheme == "sinusoidal" else scheme)
    for height, width in ((16, 20), (24, 16), (8, 8)):
        pixels = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        output = model(pixels)[0]
        torch.manual_seed(0)
        assert torch.equal(output, model(pixels, interpolate_pos_encoding=True)[0] if name != "yolos" else output)
        assert output.isfinite().all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vision-mobilevit", "nor a list of layers that read vectors of tokens"),
        ("video-videoprism_vision_model", r"separate tables \(spatial.*temporal"),
    ],
)
@pytest.mark.parametrize("scheme", [SinusoidalConfig(), LearnedConfig(num_positions=512)])
def test_vectors_that_have_no_place_are_refused(name: str, message: str, scheme: Any) -> None:
    model = tiny_model(pair_named(name))
    with pytest.raises(UnsupportedError, match=message):
        patch_model(model, scheme)
    assert not hasattr(model, "position_encoding")
