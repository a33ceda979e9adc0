"""Places of patches: in pictures of several sizes, behind masks and windows, and in what is said about a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import ViTForImageClassification

from hf_posenc import (
    LogCpbConfig,
    UnsupportedError,
    inspect_model,
    load_position_adapter,
    native_scheme,
    patch_model,
    save_position_adapter,
    unpatch_model,
)
from tests.architectures.inputs import call, inputs_for
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.matrix.running import freshly_compiled, gradients
from tests.models import tiny
from tests.thinning import in_turn

from .models import image, packed, vit

pytestmark = pytest.mark.filterwarnings("ignore:.*numbered row by row")

#: A rotation, a bias and vectors that read rows and columns.
GRID_SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("rope_nd", {}),
    ("alibi", {"axes": 2}),
    ("sinusoidal", {"axes": 2}),
]
QWEN = ("image-text-qwen2_vl", "image-text-qwen2_5_vl", "image-text-qwen3_vl")
every_grid_scheme = pytest.mark.parametrize(("scheme", "options"), GRID_SCHEMES, ids=str)


@pytest.fixture
def model() -> ViTForImageClassification:
    return vit()


def built(name: str, **options: Any) -> Any:
    return tiny_model(pair_named(name), **options)


@torch.no_grad()
def hidden(model: Any, *args: Any, **inputs: Any) -> Tensor:
    found: Tensor = model(*args, **inputs).last_hidden_state
    return found


def tokens(model: ViTForImageClassification, pixels: Tensor, **options: Any) -> Tensor:
    return hidden(model.vit, pixels, **options)


def assert_native(model: Any, run: Callable[[], Tensor], atol: float = 1e-5, **options: Any) -> None:
    """The native scheme computes what the stock model computes, and without positions it computes something else."""
    stock = run()
    patch_model(model, "native", **options)
    torch.testing.assert_close(run(), stock, rtol=0, atol=atol)
    patch_model(model, "none", **options)
    assert (run() - stock).abs().max() > 0.1
    unpatch_model(model)
    assert torch.equal(run(), stock)


# What is said


def test_a_scheme_for_the_order_of_tokens_is_placed_with_a_warning(
    model: ViTForImageClassification, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="numbered row by row.*rope_nd.*axes=2"):
        patch_model(model, "alibi")
    model.save_pretrained(tmp_path)
    save_position_adapter(model, tmp_path / "scheme")
    with warnings.catch_warnings(action="error"):  # A load does not repeat it.
        again = type(model).from_pretrained(tmp_path)
        load_position_adapter(unpatch_model(again), tmp_path / "scheme")
    assert "row by row for the bias" in str(model.position_encoding.report)
    for scheme, options in (*GRID_SCHEMES, ("none", {}), ("native", {}), ("rope_nd", {})):
        with warnings.catch_warnings(action="error"):
            patch_model(model, scheme, **options)
        assert "row by row" not in str(model.position_encoding.report)
    assert "rows and columns of patches" in str(model.position_encoding.report)


def test_inspection_lists_the_table_over_the_patches(model: ViTForImageClassification) -> None:
    report = inspect_model(model)
    (table,) = report.stacks[0].tables
    weight = model.vit.embeddings.position_embeddings
    assert "embeddings.position_embeddings" in table
    assert f"{weight.shape[1]} x {weight.shape[2]}, over the patches, first patch in row 1" in table
    assert "tokens" not in report.context
    assert "patches at the image size" in report.context


def test_embeddings_that_were_exchanged_after_the_patch_are_noticed(model: ViTForImageClassification) -> None:
    patch_model(model, "rope_nd")
    tokens(model, image())
    model.vit.embeddings = vit().vit.embeddings
    with pytest.raises(UnsupportedError, match=r"embeddings.*has no position encoding"):
        tokens(model, image())


def test_a_grid_scheme_where_tokens_have_one_axis_is_pointed_out() -> None:
    model = tiny("LlamaModel")
    for scheme, options in (("rope_nd", {}), ("swin", {}), ("alibi", {"axes": 2})):
        with pytest.warns(UserWarning, match="reads rows and columns, but the tokens of the text part have one axis"):
            patch_model(model, scheme, **options)
    with pytest.raises(ValueError, match="no coordinates"):
        model(torch.arange(5).unsqueeze(0))
    with warnings.catch_warnings(action="error"):
        patch_model(model, "rope_nd", grid=(8,))


def test_the_mask_decoder_of_sam_is_left_alone() -> None:
    model = patch_model(built("vision-sam"), "rope_nd", part="vision")
    assert {stack.part for stack in model.position_encoding.report.stacks} == {"vision"}
    assert all("mask_decoder" not in name for stack in model.position_encoding.report.stacks for name in stack.placed)


# A patched model among others


MECHANISMS = [
    ("vision-vit", "learned", {}),
    ("vision-pixtral", "alibi", {"axes": 2}),
    ("vision-swin", "t5", {"axes": 2}),
    ("vision-dinov3_vit", "swin", {"grid": (4, 4)}),
    ("vision-dinov2", "rope_nd", {}),
]


@pytest.mark.parametrize(("name", "scheme", "options"), MECHANISMS, ids=str)
def test_checkpointing_changes_no_gradient_and_half_precision_is_close(
    name: str, scheme: str, options: dict[str, Any]
) -> None:
    found, outputs = [], []
    for checkpointing in (False, True):
        model = built(name)
        inputs = inputs_for(model, pair_named(name))
        torch.manual_seed(1)
        patch_model(model, scheme, **options).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(2)
        outputs.append(call(model, inputs)[0])
        found.append({key: one for key, one in gradients(model, outputs[-1].square().sum()).items() if one.numel()})
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    learned = [key for key, _ in model.named_parameters() if "position_encoding" in key]
    assert all(recomputed[key].abs().max() > 0 for key in learned)
    for key, gradient in plain.items():
        assert torch.allclose(gradient, recomputed[key], atol=1e-4 * float(gradient.abs().max())), key
    half = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    expected = call(model.eval(), inputs)[0].detach()
    rounded = call(model.to(torch.bfloat16), half)[0]
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "rope_nd", "alibi"])
def test_compiled(scheme: str) -> None:
    model = patch_model(vit(), scheme)
    expected = tokens(model, image())
    compiled = freshly_compiled(model.vit, "inductor", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(image()).last_hidden_state, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["vision-sam_vision_model", "vision-vit", "vision-dinov2"])
@torch.no_grad()
def test_the_outputs_that_a_stock_model_records_are_recorded(name: str) -> None:
    model = built(name)
    inputs = inputs_for(model, pair_named(name)) | {"output_hidden_states": True}
    stock = model(**inputs).hidden_states
    found = patch_model(model, "none")(**inputs).hidden_states
    assert [one.shape for one in found] == [one.shape for one in stock]


def test_the_vision_tower_of_llama4_has_a_table_and_a_complex_rotation() -> None:
    model = built("image-text-llama4")
    assert_native(model, lambda: hidden(model.vision_model, image()), part="vision")


# Places


@pytest.mark.parametrize(("name", "chosen"), in_turn(QWEN, GRID_SCHEMES), ids=str)
@torch.no_grad()
def test_images_packed_in_a_row_do_not_know_of_each_other(name: str, chosen: tuple[str, dict[str, Any]]) -> None:
    scheme, options = chosen
    tower = patch_model(built(name), scheme, part="vision", **options).model.visual
    inputs = packed([1, 4, 6], [1, 6, 4])
    together = hidden(tower, **inputs)
    alone = [
        hidden(tower, hidden_states=patches, grid_thw=grid.unsqueeze(0))
        for patches, grid in zip(inputs["hidden_states"].split(24), inputs["grid_thw"], strict=True)
    ]
    assert torch.allclose(torch.cat(alone), together, atol=1e-4)
    assert not torch.allclose(
        hidden(tower, **inputs | {"grid_thw": torch.tensor([[1, 6, 4]] * 2)}), together, atol=1e-3
    )


@every_grid_scheme
def test_images_of_different_sizes_in_one_batch(scheme: str, options: dict[str, Any]) -> None:
    model, sizes = patch_model(built("vision-pixtral"), scheme, **options), torch.tensor([[16, 16], [8, 12]])
    together = hidden(model, pixel_values=image(), image_sizes=sizes)
    alone = hidden(model, pixel_values=image()[1:, :, :8, :12], image_sizes=sizes[1:])
    assert torch.allclose(together[:, 16:], alone, atol=1e-4)
    model = patch_model(built("vision-siglip2_vision_model"), scheme, **options)
    pixels = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(3))
    shown, sizes = torch.tensor([[1] * 12, [1] * 6 + [0] * 6]), torch.tensor([[3, 4], [2, 3]])
    together = hidden(model, pixel_values=pixels, pixel_attention_mask=shown, spatial_shapes=sizes)
    alone = hidden(model, pixel_values=pixels[1:, :6], pixel_attention_mask=shown[1:, :6], spatial_shapes=sizes[1:])
    assert torch.allclose(together[1, :6], alone[0], atol=1e-4)


@pytest.mark.parametrize(("scheme", "options"), [("rope_nd", {}), ("alibi", {"axes": 2}), ("rope", {}), ("t5", {})])
def test_patches_that_remain_after_masking_keep_their_places(scheme: str, options: dict[str, Any]) -> None:
    """MAE keeps the patches with the least noise, in the order of the noise, which must not matter."""
    model = patch_model(built("vision-vit_mae", mask_ratio=0.5), scheme, **options)
    for parameter in model.position_encoding.parameters():
        nn.init.normal_(parameter)
    ranks = torch.arange(16).float().expand(2, -1).clone()
    reversed_ranks = ranks.clone()
    reversed_ranks[:, :8] = ranks[:, :8].flip(1)
    before, after = (hidden(model, pixel_values=image(), noise=noise) for noise in (ranks, reversed_ranks))
    assert torch.allclose(before[:, 1:].flip(1), after[:, 1:], atol=1e-4)
    assert torch.allclose(before[:, 0], after[:, 0], atol=1e-4)


@every_grid_scheme
@torch.no_grad()
def test_the_order_in_which_a_model_keeps_its_patches_does_not_matter(scheme: str, options: dict[str, Any]) -> None:
    """Qwen2.5-VL sorts patches by window. If all layers see whole images, the size of the windows has no effect."""
    outputs = []
    for window in (16, 256):
        model = built("image-text-qwen2_5_vl")
        model.model.visual.window_size = window
        patch_model(model, scheme, part="vision", **options)
        outputs.append(model.model.visual(**packed([1, 4, 6], [1, 6, 4])).pooler_output)
    assert torch.allclose(*outputs, atol=1e-4)


def swin_v2(**options: Any) -> Any:
    """A Swin v2 whose networks give biases that are large enough to be seen."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    model = transformers.Swinv2Model(transformers.Swinv2Config(**(sizes | options))).eval()
    for name, weight in model.named_parameters():
        if "continuous_position_bias_mlp" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({"window_size": 4}, 4),
        # Windows that reach beyond the image.
        ({"window_size": 7, "image_size": 64}, 7),
        ({"window_size": 4, "pretrained_window_sizes": [6, 6]}, 6),
    ],
)
@torch.no_grad()
def test_networks_of_swin_v2_are_log_cpb(options: dict[str, Any], window: int) -> None:
    model = swin_v2(**options)
    pixels = torch.randn(2, 3, model.config.image_size, model.config.image_size)
    assert native_scheme(model) == LogCpbConfig(window, axes=2)
    # Biases of up to 16 in another order of float32 operations, in four layers; outputs of about 3.
    assert_native(model, lambda: hidden(model, pixels), atol=3e-5)


def test_other_networks_of_displacements_have_no_name() -> None:
    mixed = swin_v2(window_size=4, pretrained_window_sizes=[6, 4])
    with pytest.raises(UnsupportedError, match="windows of different sizes"):
        native_scheme(mixed)
    other = swin_v2(window_size=4)
    other.encoder.layers[0].blocks[0].attention.self.continuous_position_bias_mlp[1] = torch.nn.GELU()
    with pytest.raises(UnsupportedError, match=r"network of displacements.*not among the schemes"):
        native_scheme(other)
