"""Evaluations of models of images: equal patches, shuffled patches, two dogs in a picture, accuracy by resolution."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.metrics import (
    MeasurementError,
    image_sensitivity_test,
    picture_dog_test,
    resolution_test,
)
from hf_posenc.metrics.images.patches import PatchSize, cut, drawn_images, joined_patches, patch_outputs
from hf_posenc.metrics.images.pictures import Normalization, Pictures, as_tensor, load_pictures, resized
from hf_posenc.metrics.images.sensitivity import SIDE, picture_of_two_dogs
from hf_posenc.schemes import AlibiConfig, RopeNdConfig, SinusoidalConfig
from tests.patching.composites.models import COMPOSITES

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "patch_size": 4, "initializer_range": 0.2,
}  # fmt: skip
SCHEMES = ["native", "none", RopeNdConfig(), RopeNdConfig(assignment="mixed"), SinusoidalConfig(axes=2),
           AlibiConfig(axes=2), "learned"]  # fmt: skip


@pytest.fixture(scope="module")
def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=32, num_labels=10)).eval()


@pytest.fixture(scope="module")
def sensitivity(vit):
    return image_sensitivity_test(vit, SCHEMES)


def test_without_positions_equal_patches_are_equal_and_shuffled_ones_keep_their_states(sensitivity):
    assert sensitivity.record("none", "sees_places").passed is False
    numbers = [record.value for record in sensitivity.of("none") if record.value is not None]
    assert len(numbers) == 2 * 2 * 3 + 3 + 1  # two steps to two sides in three layers, shuffled in them, the whole
    assert max(numbers) < 1e-5


@pytest.mark.parametrize("label", range(len(SCHEMES)))
def test_every_scheme_tells_equal_patches_apart(sensitivity, label):
    subject = sensitivity.subjects[label]
    assert subject.error is None
    if subject.scheme != "none":
        assert sensitivity.record(subject.label, "sees_places").passed
        for direction in ("right", "down"):
            for step in (1, 3):
                assert sensitivity.value(subject.label, direction, step=step, layer=2) > 1e-4
        assert sensitivity.value(subject.label, "shuffled", layer=2) > 1e-4
        assert sensitivity.value(subject.label, "whole") > 1e-5


def test_a_scheme_on_the_grid_treats_rows_and_columns_alike_and_one_in_raster_order_does_not(vit):
    result = image_sensitivity_test(vit, [AlibiConfig(axes=2), "alibi"], steps=[1])
    plane, raster = result.labels

    def down_over_right(label: str) -> float:
        down, right = (result.value(label, name, step=1, layer=2) for name in ("down", "right"))
        return down / right

    assert 0.5 < down_over_right(plane) < 2
    assert down_over_right(raster) > 2


def test_the_two_dogs_have_the_same_pixels(vit):
    picture = picture_of_two_dogs(8, 8, (1, 1), (1, 5))
    patches = cut(picture[None, None], PatchSize(4, 4, 1))[0]
    one, other = patches[1 : 1 + SIDE, 1 : 1 + SIDE], patches[1 : 1 + SIDE, 5 : 5 + SIDE]
    assert torch.equal(one, other)
    assert one.sum() > 10
    # There is something beside them.
    assert picture.sum() > 2 * one.sum()


def test_the_dog_test_of_pictures(vit):
    result = picture_dog_test(vit, SCHEMES)
    for subject in result.subjects:
        told_apart = result.record(subject.label, "told_apart").passed
        assert told_apart == (subject.scheme != "none")
        layers = [record.value for record in result.of(subject.label, "relative_l2")]
        assert len(layers) == 3
        additive = subject.scheme in ("native", "learned", "sinusoidal")
        assert (layers[0] > 1e-3) == additive


def test_class_and_register_tokens_are_no_patches():
    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(**SIZES, image_size=32, num_register_tokens=3)
    model = Dinov2WithRegistersModel(config).eval()
    size = PatchSize.of(model)
    images = drawn_images(size, 2, 5, 7, seed=0)
    outputs = patch_outputs(model, images)
    assert [tuple(state.shape) for state in outputs.states] == [(2, 5, 7, 32)] * 3
    whole = model(pixel_values=images, output_hidden_states=True)
    assert torch.allclose(outputs.states[-1].flatten(1, 2), whole.hidden_states[-1][:, 4:], atol=1e-6)
    assert torch.equal(joined_patches(cut(images, size)), images)


def test_a_model_that_merges_patches_says_so():
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
    assert "merges patches" in picture_dog_test(SwinModel(config)).subjects[0].error


def clip() -> CLIPModel:
    part = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPModel(CLIPConfig(text_config=part, vision_config=part | {"image_size": 32, "patch_size": 4}))


def three_classes() -> ViTForImageClassification:
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=32, num_labels=3))


def headless() -> ViTModel:
    return ViTModel(ViTConfig(**SIZES, image_size=32, num_labels=10))


@pytest.mark.parametrize(
    ("measure", "model", "options", "message"),
    [
        (image_sensitivity_test, None, {"steps": [8]}, "1 to 7 patches apart"),
        (image_sensitivity_test, None, {"images": 0}, "at least one image"),
        (picture_dog_test, None, {"first": (0, 0), "second": (1, 1)}, "dogs at .* overlap"),
        (picture_dog_test, None, {"first": (0, 0), "second": (0, 7)}, "Each dog takes 2 x 2"),
        (picture_dog_test, None, {"first": (0, -1), "second": (4, 4)}, "Each dog takes 2 x 2"),
        (picture_dog_test, None, {"first": (-1, 0), "second": (4, 4)}, "Each dog takes 2 x 2"),
        (picture_dog_test, None, {"first": (1, 2, 3)}, "a row and a column"),
        (picture_dog_test, clip, {}, r"model\.vision_model\..*command line.*save_pretrained"),
        (picture_dog_test, COMPOSITES["qwen2_vl"].model, {}, "sizes of their grids.*text part.* dog and sensitivity"),
        (resolution_test, None, {"resolutions": [30]}, "not a whole number of patches.* Use 32"),
        (resolution_test, None, {"resolutions": [2]}, "not a whole number of patches.* Use 4"),
        (resolution_test, three_classes, {"resolutions": [32]}, "10 classes, but the model has 3"),
        (resolution_test, headless, {"resolutions": [32], "max_pictures": 1}, "AutoModelForImageClassification"),
        (resolution_test, None, {"resolutions": [32], "max_pictures": 0}, "no pictures"),
    ],
)
def test_what_cannot_be_measured_is_refused(vit, measure, model, options, message):
    with pytest.raises((MeasurementError, UnsupportedError), match=message):
        measure(vit if model is None else model(), **options)


class TestResolution:
    def test_accuracy_is_the_share_of_right_answers(self, vit):
        digits = load_pictures().select(range(40))
        result = resolution_test(vit, dataset=digits, resolutions=[32], batch_size=7)
        pixels = torch.stack([resized(digits.picture(index), 32, 3) for index in range(40)])
        with torch.no_grad():
            logits = vit(pixel_values=2 * pixels - 1).logits
        labels = torch.tensor(digits.labels)
        loss = float(torch.nn.functional.cross_entropy(logits, labels))
        assert [record.value for record in result.of(quantity="loss")] == [pytest.approx(loss, rel=1e-5)]
        (accuracy,) = result.of(quantity="accuracy")
        assert (accuracy.value, accuracy.count) == (int((logits.argmax(-1) == labels).sum()) / 40, 40)

    def test_every_scheme_reads_every_resolution(self, vit):
        result = resolution_test(vit, SCHEMES, resolutions=[24, 32, 48], max_pictures=20)
        assert all(subject.error is None for subject in result.subjects)
        for label in result.labels[:-1]:
            for resolution in (24, 32, 48):
                record = result.record(label, "accuracy", resolution=resolution)
                assert record.low <= record.value <= record.high
        # A table in raster order has no rows for more patches.
        assert "48 pixels: A sequence of length 145" in result.record(result.labels[-1], "accuracy", resolution=48).note


class TestPictures:
    def test_the_digits(self):
        digits = load_pictures("digits")
        assert (len(digits), digits.classes) == (1797, tuple("0123456789"))
        picture = digits.picture(0)
        assert (picture.shape, digits.labels[0]) == ((1, 8, 8), 0)
        assert 0 == picture.min() < picture.max() <= 1
        chosen = digits.select([5, 3]).select([1])
        assert isinstance(chosen, Pictures)
        assert torch.equal(chosen.picture(0), digits.picture(3))
        assert chosen.labels == (digits.labels[3],)

    def test_a_folder_of_classes(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        with pytest.raises(UsageError, match="one folder per class"):
            load_pictures(str(tmp_path))
        for label, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (tmp_path / label).mkdir()
            image.new("RGB", (6, 4), color).save(tmp_path / label / "one.png")
        pictures = load_pictures(str(tmp_path))
        assert (pictures.classes, pictures.labels) == (("blue", "red"), (0, 1))
        assert pictures.picture(1).shape == (3, 4, 6)
        assert pictures.picture(1)[:, 0, 0].tolist() == [1, 0, 0]
        with pytest.raises(UsageError, match="no column caption"):
            load_pictures(str(tmp_path), image_column="caption")

    def test_grey_deep_and_transparent_pictures(self):
        image = pytest.importorskip("PIL.Image")
        assert as_tensor(image.new("L", (3, 2), 255)).tolist() == torch.ones(1, 2, 3).tolist()
        assert as_tensor(image.new("I;16", (3, 2), 65535)).max() == 1
        assert as_tensor(image.new("RGBA", (3, 2), (255, 0, 0, 0))).shape == (3, 2, 3)

    def test_resizing(self):
        grey = torch.rand(1, 8, 8)
        assert torch.equal(resized(grey, 8, 3), grey.expand(3, -1, -1))
        assert resized(torch.rand(3, 5, 9), 16, 1).shape == (1, 16, 16)
        assert 0 <= resized(grey, 40, 1).min() <= resized(grey, 40, 1).max() <= 1
        assert resized(torch.full((1, 8, 8), 0.25), 20, 1).sub(0.25).abs().max() < 1e-6
        assert Normalization()(torch.tensor([[[0.0, 1.0]]])).tolist() == [[[-1.0, 1.0]]]
