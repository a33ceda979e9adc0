"""Images of several sizes in one call: padded to a common grid, or packed in one row, as VLMs pass them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import patch_model
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.thinning import in_turn

pytestmark = pytest.mark.usefixtures("without_gradients")
SIZES = [(4, 4), (3, 5), (6, 2), (1, 7)]


def image(model: Any, rows: int, columns: int, seed: int = 0) -> Tensor:
    side = model.config.patch_size
    return torch.randn(1, 3, side * rows, side * columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pair", ["vision-idefics3_vision", "vision-smolvlm_vision"])
def test_the_native_scheme_is_the_stock_model_at_every_size_and_with_padding(pair: str) -> None:
    model = tiny_model(pair_named(pair))
    images = [image(model, *size) for size in SIZES]
    together = torch.cat([image(model, 6, 6), image(model, 6, 6, seed=1)])
    shown = torch.ones(2, 6, 6, dtype=torch.bool)
    shown[1, 4:], shown[1, :, 3:] = False, False

    def outputs() -> list[Tensor]:
        alone = [model(pixel_values=one).last_hidden_state for one in images]
        padded = model(pixel_values=together, patch_attention_mask=shown).last_hidden_state
        return [*alone, padded[shown.flatten(1)]]

    stock = outputs()
    patch_model(model, "native")
    for ours, theirs in zip(outputs(), stock, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scheme", ["rope_nd", "rope", "learned", "alibi", "sinusoidal"])
def test_an_image_padded_to_a_larger_one_is_read_as_alone(scheme: str) -> None:
    options: dict[str, Any] = {"learned": {"grid": (4, 4)}, "sinusoidal": {"axes": 2}}.get(scheme, {})
    model = patch_model(tiny_model(pair_named("vision-idefics3_vision")), scheme, **options)
    small, large = image(model, 3, 2), image(model, 4, 5, seed=1)
    padded = torch.zeros_like(large)
    padded[:, :, : small.shape[2], : small.shape[3]] = small
    shown = torch.zeros(2, 4, 5, dtype=torch.bool)
    shown[0], shown[1, :3, :2] = True, True
    together = model(pixel_values=torch.cat([large, padded]), patch_attention_mask=shown).last_hidden_state
    alone = model(pixel_values=small).last_hidden_state
    torch.testing.assert_close(together[1][shown[1].flatten()], alone[0], atol=1e-5, rtol=1e-5)


def test_the_native_scheme_is_the_stock_model_for_images_in_a_row() -> None:
    model = tiny_model(pair_named("vision-minicpm_ocr_vision"))
    pixels = torch.cat([image(model, 1, rows * columns) for rows, columns in SIZES], dim=3)
    stock = model(pixel_values=pixels, target_sizes=torch.tensor(SIZES)).last_hidden_state
    patch_model(model, "native")
    ours = model(pixel_values=pixels, target_sizes=torch.tensor(SIZES)).last_hidden_state
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(("scheme", "merges"), in_turn(["rope_nd", "none", "learned", "rope", "alibi"], [False, True]))
def test_images_packed_in_a_row_are_read_as_alone(scheme: str, merges: bool) -> None:
    """MiniCPM merges patches two by two after a layer, so the layers behind it have a coarser grid."""
    options = {"insert_layer_id": 0, "window_kernel_size": [2, 2]} if merges else {}
    model = tiny_model(pair_named("vision-minicpm_ocr_vision"), **options)
    patch_model(model, scheme, **({"grid": (4, 4)} if scheme == "learned" else {}))

    def strip(rows: int, columns: int, seed: int) -> Tensor:
        return image(model, 1, rows * columns, seed)

    def run(pixels: Tensor, sizes: list[list[int]]) -> Tensor:
        hidden: Tensor = model(pixel_values=pixels, target_sizes=torch.tensor(sizes)).last_hidden_state
        return hidden

    one, other = strip(4, 4, 0), strip(2, 6, 1)
    alone = torch.cat([run(one, [[4, 4]]), run(other, [[2, 6]])], dim=1)
    packed = run(torch.cat([one, other], dim=3), [[4, 4], [2, 6]])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    # Rows and columns count: the same patches in another shape of image are something else.
    turned = run(one, [[2, 8]])
    reads_places = scheme in ("rope_nd", "learned")
    assert merges or torch.allclose(turned, run(one, [[4, 4]]), atol=1e-5) != reads_places
