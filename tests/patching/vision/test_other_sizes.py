"""Pictures, videos and sounds of another size than the config states, under schemes that discard the table for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ASTConfig, ASTModel

from hf_posenc import patch_model
from tests.architectures.inputs import accepted, call, inputs_for
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.models import SIZES
from tests.thinning import in_turn

pytestmark = pytest.mark.usefixtures("without_gradients")
#: Architectures that compare sizes, resize their table in ways of their own, or do not resize it at all.
PICTURES = [
    "video-videomae", "video-vivit", "vision-mgp-str", "vision-aimv2_vision_model", "vision-vit", "vision-yolos",
    "vision-vitdet", "vision-lw_detr_vit", "vision-radio", "vision-sam_vision_model", "vision-sam2_hiera_det_model",
    "vision-clip_vision_model", "vision-siglip_vision_model", "vision-deit", "vision-vit_mae", "vision-ijepa",
]  # fmt: skip


def first_output(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def size_of(model: Any) -> int:
    size = model.config.image_size
    return int(size if isinstance(size, int) else size[0])


def pictures(model: Any, rows: int, columns: int) -> Tensor:
    frames = getattr(model.config, "num_frames", None)
    shape = (1, 3, rows, columns) if frames is None else (1, frames, 3, rows, columns)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "scheme"), in_turn(PICTURES, ["none", "sinusoidal"]))
def test_pictures_of_other_sizes_without_the_discarded_table(name: str, scheme: str) -> None:
    """Many stock models refuse them, unless they are told to interpolate their tables."""
    model = tiny_model(pair_named(name)).eval()
    size = size_of(model)

    def output(rows: int, columns: int, **options: Any) -> Tensor:
        torch.manual_seed(0)
        return first_output(model(pixel_values=pictures(model, rows, columns), **options))

    native = output(size, size)
    patch_model(model, scheme)
    assert output(size, size).shape == native.shape
    assert output(2 * size, size).isfinite().all()
    if "interpolate_pos_encoding" in accepted(type(model).forward):
        for shape in ((size, size + size // 4), (size + size // 2, size), (size // 2, size // 2)):
            found = output(*shape)
            assert found.isfinite().all()
            assert torch.equal(found, output(*shape, interpolate_pos_encoding=True))


@pytest.mark.parametrize("scheme", ["none", "alibi", "sinusoidal"])
def test_a_sound_that_is_twice_as_long(scheme: str) -> None:
    model = ASTModel(ASTConfig(**SIZES, max_length=64, num_mel_bins=32)).eval()
    patch_model(model, scheme)
    short, long = (model(input_values=torch.ones(1, length, 32)).last_hidden_state for length in (64, 128))
    assert long.shape[1] > 2 * short.shape[1]


@pytest.mark.parametrize(("name", "layer"), [
    ("vision-sam2_hiera_det_model", "blocks.0"),
    ("vision-vitdet", "encoder.layer.0"),
    ("vision-radio", "encoder.layer.0"),
])  # fmt: skip
def test_vectors_are_added_to_the_patches_of_the_call(name: str, layer: str) -> None:
    """The tables have channels first, are resized as squares, or belong to a grid that is larger than any picture.

    Products of sinusoidal vectors depend on the distance of their tokens only.
    """
    model = tiny_model(pair_named(name)).eval()
    size = size_of(model)
    seen: list[Tensor] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for scheme in ("none", "sinusoidal"):
        patch_model(model, scheme)
        model(pixel_values=pictures(model, 2 * size, size))
    added = (seen[1] - seen[0])[0]
    if name == "vision-vitdet":
        added = added.permute(1, 2, 0)
    vectors = added.reshape(-1, added.shape[-1])[-2 * size :] if added.dim() == 2 else added.flatten(0, 1)
    vectors = vectors[vectors.abs().amax(-1) > 0]
    products = vectors @ vectors.T
    assert len(vectors) >= 32
    assert products[0].std() > 0.1
    # Sums of float32 values up to the width.
    assert (products[1:, 1:] - products[:-1, :-1]).abs().max() < 1e-3


def test_a_table_that_is_called_without_a_picture_is_not_resized() -> None:
    """Perceiver has tables of one class for pictures and for texts."""
    pair = pair_named("other-perceiver")
    model = tiny_model(pair).eval()
    inputs = inputs_for(model, pair)
    assert "input_ids" in inputs
    expected = call(model, inputs).logits
    assert not torch.equal(call(patch_model(model, "none"), inputs).logits, expected)
