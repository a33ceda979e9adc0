"""Vision models of every family: native schemes, other schemes, and no scheme."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import SequenceLengthError, UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy.anatomy import find_stacks
from hf_posenc.patching.layouts import Grid
from hf_posenc.patching.place import model_checks
from tests.patching.vision.families import FAMILIES, noise, output, packed

pytestmark = pytest.mark.filterwarnings("ignore:.*numbered row by row")

#: Families whose attention can take no scheme, because queries and keys are not the same patches.
POOLED = ("hiera", "segformer")
#: Families without a native scheme, and the reason.
UNDESCRIBED = {
    "swinv2": "network of displacements",
    "vjepa2": "rotation",
    "sam": "decomposed bias tables",
    "timesformer": "several position tables",
    "yolos": "several position tables",
}
AXES = {"videomae": 3, "vivit": 3, "vjepa2": 3}
#: Families whose tokens keep the order of the patches, all of which see each other.
PLAIN = (
    "vit", "deit", "beit", "beit_shared", "data2vec-vision", "dinov2", "dinov2_with_registers", "dinov3_vit", "siglip",
    "clip", "videomae", "vivit", "vjepa2", "ijepa", "yolos",
)  # fmt: skip
#: Families that take other resolutions, and the argument for it.
RESIZED = {
    "vit": {"interpolate_pos_encoding": True},
    "deit": {"interpolate_pos_encoding": True},
    "dinov2": {},
    "dinov2_with_registers": {},
    "dinov3_vit": {},
    "siglip": {"interpolate_pos_encoding": True},
    "clip": {"interpolate_pos_encoding": True},
    "beit": {},
    "pixtral": {},
    "ijepa": {"interpolate_pos_encoding": True},
}


@pytest.fixture(autouse=True)
def _towers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets towers of composites be patched on their own, which is refused otherwise, as they cannot be saved so."""
    monkeypatch.setattr(model_checks, "_refuse_part", lambda model: None)


def grid_options(family: str) -> dict[str, Any]:
    return {"grid": (14,) * (AXES.get(family, 2) - 1)}


def real(family: str, hidden: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Without padding, whose outputs have no meaning."""
    return hidden[inputs["pixel_attention_mask"].bool()] if family == "siglip2" else hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_schemes_act_and_leave_no_trace(family: str) -> None:
    model, inputs = FAMILIES[family].build(), FAMILIES[family].inputs()
    stock = output(model, inputs)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {}
    for scheme, options in (("none", {}), ("sinusoidal", {}), ("alibi", {}), ("rope_nd", grid_options(family))):
        in_layers = scheme in ("alibi", "rope_nd")
        if in_layers and family in POOLED:
            with pytest.raises(UnsupportedError, match="common places"):
                output(patch_model(model, scheme, **options), inputs)
        elif scheme == "rope_nd" and family == "timesformer":
            with pytest.raises(UnsupportedError, match="not the patches of an image"):
                output(patch_model(model, scheme, **options), inputs)
        else:
            found[scheme] = real(family, output(patch_model(model, scheme, **options), inputs), inputs)
    for scheme, hidden in found.items():
        assert torch.isfinite(hidden).all()
        assert torch.equal(hidden, found["none"]) == (scheme == "none")
        assert torch.allclose(hidden, real(family, stock, inputs), atol=1e-5) == (
            (scheme, family) in (("none", "segformer"), ("sinusoidal", "videomae"))
        )
    unpatch_model(model)
    assert torch.equal(output(model, inputs), stock)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_native(family: str) -> None:
    model, inputs = FAMILIES[family].build(), FAMILIES[family].inputs()
    stock = output(model, inputs)
    if family in UNDESCRIBED:
        with pytest.raises(UnsupportedError, match=UNDESCRIBED[family]):
            native_scheme(model)
        return
    patch_model(model, "native")
    assert torch.allclose(real(family, output(model, inputs), inputs), real(family, stock, inputs), atol=1e-5)


@pytest.mark.parametrize("family", RESIZED)
def test_native_at_another_resolution(family: str) -> None:
    model = FAMILIES[family].build()
    inputs = {"pixel_values": noise(2, 3, 24, 20)} | RESIZED[family]
    stock = output(model, inputs)
    patch_model(model, native_scheme(model))
    assert torch.allclose(output(model, inputs), stock, atol=1e-4)


@pytest.mark.parametrize("family", PLAIN)
def test_without_positions_swapped_patches_swap_the_output(family: str) -> None:
    model, inputs = FAMILIES[family].build(), FAMILIES[family].inputs()
    projection = projection_of(model)
    changed = {}
    for scheme in ("native", "none"):
        if scheme == "none":
            patch_model(model, scheme)
        before = output(model, inputs)
        if projection is None:
            after = output(model, swapped_pixels(inputs))
        else:
            handle = projection.register_forward_hook(swap_first_two)
            after = output(model, inputs)
            handle.remove()
        order = list(range(before.shape[1]))
        first = first_patch(family, before.shape[1])
        order[first : first + 2] = order[first : first + 2][::-1]
        changed[scheme] = float((before[:, order] - after).abs().max())
    assert changed["none"] < 1e-4
    assert changed["native"] > 1e-2


def swap_first_two(projection: nn.Module, args: Any, patches: Tensor) -> Tensor:
    """The output of a projection with two patches swapped, which may be the rows of a batch."""
    if patches.shape[2:].numel() == 1:
        return torch.cat([patches[[1, 0]], patches[2:]])
    flat = patches.flatten(2)
    return torch.cat([flat[..., [1, 0]], flat[..., 2:]], dim=-1).view_as(patches)


def projection_of(model: PreTrainedModel) -> nn.Module | None:
    grid = find_stacks(model)[0].layout
    assert isinstance(grid, Grid)
    found: nn.Module | None = grid.projection
    return found


def swapped_pixels(inputs: dict[str, Any]) -> dict[str, Any]:
    pixels = inputs["pixel_values"].clone()
    pixels[..., :4, :8] = torch.cat([pixels[..., :4, 4:8], pixels[..., :4, :4]], dim=-1)
    return inputs | {"pixel_values": pixels}


def first_patch(family: str, length: int) -> int:
    """Number of tokens before the patches: what is left of 16, or of 32 in videos."""
    if family == "yolos":
        return 1
    return length - (32 if family in AXES else 16)


@pytest.mark.parametrize(("scheme", "options"), [("rope_nd", {}), ("alibi", {"axes": 2}), ("sinusoidal", {"axes": 2})])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_images_packed_in_a_row_do_not_know_of_each_other(family: str, scheme: str, options: dict[str, Any]) -> None:
    model, grids = FAMILIES[family].build(), [[1, 4, 6], [1, 6, 4]]
    inputs = packed(grids, 96)
    patch_model(model, scheme, **options)
    together = output(model, inputs)
    alone = [
        output(model, {"hidden_states": inputs["hidden_states"][one], "grid_thw": torch.tensor([grid])})
        for one, grid in zip((slice(0, 24), slice(24, 48)), grids, strict=True)
    ]
    assert torch.allclose(torch.cat(alone), together, atol=1e-4)


@pytest.mark.parametrize(("scheme", "options"), [("rope_nd", {}), ("alibi", {"axes": 2}), ("sinusoidal", {"axes": 2})])
def test_images_of_different_sizes_in_one_batch(scheme: str, options: dict[str, Any]) -> None:
    model = patch_model(FAMILIES["pixtral"].build(), scheme, **options)
    inputs = FAMILIES["pixtral"].inputs()
    together = output(model, inputs)
    small = {"pixel_values": inputs["pixel_values"][1:, :, :8, :12], "image_sizes": inputs["image_sizes"][1:]}
    assert torch.allclose(together[:, 16:], output(model, small), atol=1e-4)
    model = patch_model(FAMILIES["siglip2"].build(), scheme, **options)
    inputs = FAMILIES["siglip2"].inputs()
    small = {name: value[1:] for name, value in inputs.items()}
    small |= {"pixel_values": small["pixel_values"][:, :6], "pixel_attention_mask": torch.ones(1, 6, dtype=torch.int64)}
    assert torch.allclose(output(model, inputs)[1, :6], output(model, small)[0], atol=1e-4)


@pytest.mark.parametrize(("scheme", "options"), [("rope_nd", {}), ("alibi", {"axes": 2}), ("rope", {}), ("t5", {})])
def test_patches_that_remain_after_masking_keep_their_places(scheme: str, options: dict[str, Any]) -> None:
    """MAE keeps the patches with the least noise, in the order of the noise, which must not matter."""
    model = FAMILIES["vit_mae"].build()
    patch_model(model, scheme, **options)
    for parameter in model.position_encoding.parameters():
        torch.nn.init.normal_(parameter)
    ranks = torch.arange(16).float().expand(2, -1).clone()
    reversed_ranks = ranks.clone()
    reversed_ranks[:, :8] = ranks[:, :8].flip(1)
    pixels = noise(2, 3, 16, 16)
    before = output(model, {"pixel_values": pixels, "noise": ranks})
    after = output(model, {"pixel_values": pixels, "noise": reversed_ranks})
    assert torch.allclose(before[:, 1:].flip(1), after[:, 1:], atol=1e-4)
    assert torch.allclose(before[:, 0], after[:, 0], atol=1e-4)


@pytest.mark.parametrize(("scheme", "options"), [("rope_nd", {}), ("alibi", {"axes": 2}), ("sinusoidal", {"axes": 2})])
def test_the_order_in_which_a_model_keeps_its_patches_does_not_matter(scheme: str, options: dict[str, Any]) -> None:
    """Qwen2.5-VL sorts patches by window. If all layers see whole images, the size of the windows has no effect."""
    outputs = []
    for window in (16, 256):
        model = FAMILIES["qwen2_5_vl"].build(window_size=window, fullatt_block_indexes=[0, 1])
        patch_model(model, scheme, **options)
        with torch.no_grad():
            outputs.append(model(**packed([[1, 4, 6], [1, 6, 4]], 96)).pooler_output)
    assert torch.allclose(*outputs, atol=1e-4)


MECHANISMS = [
    ("qwen2_5_vl", "rope_nd", {}),
    ("qwen3_vl", "sinusoidal", {"axes": 2}),
    ("pixtral", "alibi", {"axes": 2}),
    ("swin", "t5", {"axes": 2}),
    ("dinov3_vit", "swin", {"grid": (4, 4)}),
]


@pytest.mark.parametrize(("family", "scheme", "options"), MECHANISMS)
def test_eager_attention_equals_sdpa_and_half_precision_is_close(
    family: str, scheme: str, options: dict[str, Any]
) -> None:
    inputs, outputs = FAMILIES[family].inputs(), []
    for implementation in ("eager", "sdpa"):
        model = FAMILIES[family].build(attn_implementation=implementation)
        torch.manual_seed(1)
        outputs.append(output(patch_model(model, scheme, **options), inputs))
    assert torch.allclose(*outputs, atol=1e-4)
    half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    found = output(model.to(torch.bfloat16), half).float()
    assert (found - outputs[1]).abs().mean() < 0.05 * outputs[1].abs().mean()


@pytest.mark.parametrize(("family", "scheme", "options"), MECHANISMS)
def test_gradient_checkpointing(family: str, scheme: str, options: dict[str, Any]) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = FAMILIES[family].build()
        torch.manual_seed(1)
        patch_model(model, scheme, **options).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**FAMILIES[family].inputs()).last_hidden_state.square().sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    first, second = gradients
    assert first.keys() == second.keys()
    assert any("position_encoding" in name for name in first) == (scheme in ("swin", "t5"))
    for name, gradient in first.items():
        assert torch.allclose(gradient, second[name], atol=1e-4 * float(gradient.abs().max())), name


def test_an_image_that_a_table_cannot_be_resized_to_is_an_error_with_the_remedy() -> None:
    model = patch_model(FAMILIES["dinov2"].build(), "learned", grid=(4, 4), interpolation="none")
    with pytest.raises(ValueError, match=r"grid of 6 x 5, larger than the 4 x 4.*grid=\(6, 5\)"):
        output(model, {"pixel_values": noise(1, 3, 24, 20)})
    patch_model(model, "learned", num_positions=17)
    with pytest.raises(SequenceLengthError, match="31 is longer than the 17 positions"):
        output(model, {"pixel_values": noise(1, 3, 24, 20)})


@pytest.mark.parametrize("name", ["qwen3_vl", "sam", "vit", "dinov2"])
@torch.no_grad()
def test_the_outputs_that_a_stock_model_records_are_recorded(name: str) -> None:
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    stock = model(**inputs, output_hidden_states=True).hidden_states
    patch_model(model, "none")
    found = model(**inputs, output_hidden_states=True).hidden_states
    assert found is not None
    assert [one.shape for one in found] == [one.shape for one in stock]
