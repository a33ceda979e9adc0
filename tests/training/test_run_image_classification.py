"""run_image_classification from its command line: what it writes, what it reloads as, and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForImageClassification, pipeline

import hf_posenc
from hf_posenc.metrics import resolution_test
from hf_posenc.metrics.images.pictures import Normalization, Pictures, load_pictures
from hf_posenc.report import Result
from tests.training.run_cases import curve, losses, results
from training import run_image_classification
from training.data.loading import split_rows
from training.data.pictures import Augmentation, PictureRows
from training.trainer import SettingsError

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4,
}  # fmt: skip


#: RoPE-Mixed, read at three resolutions.
MIXED: dict[str, Any] = {
    "scheme": "rope_nd", "scheme_options": '{"assignment": "mixed"}', "eval_resolutions": [12, 16, 24],
}  # fmt: skip


def words(output: Path, **changes: Any) -> list[str]:
    """A command line; an option changed to `None` is left out."""
    options: dict[str, Any] = {
        "model_type": "vit", "config_overrides": json.dumps(SIZES), "output_dir": output, "train_resolution": 16,
        "max_train_samples": 96, "max_eval_samples": 40, "max_steps": 12, "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 5,
        "disable_tqdm": "true", "use_cpu": "true",
    } | changes  # fmt: skip
    listed = {name: value for name, value in options.items() if isinstance(value, list)}
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None and name not in listed]
    return flags + [word for name, values in listed.items() for word in (f"--{name}", *map(str, values))]


def run(*arguments: Any, **changes: Any) -> int:
    return run_image_classification.main(words(*arguments, **changes))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with RoPE-Mixed."""
    output = tmp_path_factory.mktemp("runs") / "mixed"
    assert run(output, **MIXED) == 0
    return output


def test_a_run_learns_and_reads_other_resolutions(mixed: Path) -> None:
    logged = losses(mixed)
    assert len(logged) == 12
    assert sum(logged[-4:]) < sum(logged[:4])
    figures = results(mixed)
    assert figures["train_rows"] == 96
    assert figures["eval_accuracy"] == figures["accuracy_at_16"]
    measured = Result.load(mixed / "resolution.json")
    (label,) = measured.labels
    assert label == "rope_nd(assignment=mixed)"
    for resolution in (12, 16, 24):
        assert measured.value(label, "accuracy", resolution=resolution) == figures[f"accuracy_at_{resolution}"]


def test_the_saved_model_is_the_one_that_was_measured(mixed: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(mixed).eval()
    assert model.position_encoding.config == hf_posenc.RopeNdConfig(assignment="mixed")
    held_out = split_rows(load_pictures(), [359], 0)[1].select(range(40))
    records = resolution_test(model, dataset=held_out, resolutions=[12, 16, 24]).of(quantity="accuracy")
    accuracies = {record.at["resolution"]: record.value for record in records}
    assert accuracies == {size: results(mixed)[f"accuracy_at_{size}"] for size in (12, 16, 24)}
    assert model.config.id2label[9] == "9"


def test_a_pipeline_prepares_pictures_as_training_does(mixed: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    model = AutoModelForImageClassification.from_pretrained(mixed).eval()
    pixels = (255 * load_pictures().picture(3)[0]).round().byte().numpy()
    pictures = Pictures("", [image.fromarray(numpy.ascontiguousarray(pixels))], (3,), ("3",))
    row = PictureRows(pictures, 16, 3, Normalization())[0]["pixel_values"]
    with torch.no_grad():
        expected = model(pixel_values=row[None]).logits.softmax(-1).max()
    from transformers import ViTImageProcessorPil

    classify = pipeline("image-classification", model, image_processor=ViTImageProcessorPil.from_pretrained(mixed))
    # Pillow rounds pixels to whole numbers.
    assert classify(pictures.items[0])[0]["score"] == pytest.approx(float(expected), abs=1e-2)


def test_a_resumed_run_goes_on_with_the_same_curve(mixed: Path, tmp_path: Path) -> None:
    output = shutil.copytree(mixed, tmp_path / "cut")
    (output / "model.safetensors").unlink()
    for name in ("checkpoint-12", "checkpoint-10"):
        for path in sorted((output / name).iterdir()):
            path.unlink()
    assert run(output, **MIXED) == 0
    assert [entry for entry in curve(output) if "loss" in entry] == [entry for entry in curve(mixed) if "loss" in entry]
    assert (output / "model.safetensors").read_bytes() == (mixed / "model.safetensors").read_bytes()


def test_a_trained_model_takes_another_scheme_and_other_pictures(mixed: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, label in enumerate(("blank", "ink")):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for copy in range(6):
            image.new("RGB", (20 + copy, 10), (40 * copy, 250 * number, 0)).save(
                tmp_path / "photos" / label / f"{copy}.png"
            )
    output = tmp_path / "on"
    changes: dict[str, Any] = {
        "model_type": None, "config_overrides": None, "train_resolution": None, "model_name_or_path": mixed,
        "dataset_name": tmp_path / "photos", "scheme": "alibi", "scheme_options": '{"axes": 2}', "max_steps": 2,
        "per_device_train_batch_size": 4, "random_crop": 0.5, "random_flip": "true",
    }  # fmt: skip
    assert run(output, **changes) == 2  # the head is for ten classes
    assert run(output, **changes, ignore_mismatched_sizes="true") == 0
    model = AutoModelForImageClassification.from_pretrained(output)
    assert model.position_encoding.config == hf_posenc.AlibiConfig(axes=2)
    assert model.config.id2label == {0: "blank", 1: "ink"}
    assert model.config.image_size == 16


def test_without_a_model_a_small_vit_is_trained(tmp_path: Path) -> None:
    small: dict[str, Any] = {"model_type": None, "config_overrides": None, "train_resolution": None}
    assert run(tmp_path / "out", **small, max_steps=1) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["image_size"]) == ("vit", 4, 32)
    assert results(tmp_path / "out")["accuracy_at_32"] == results(tmp_path / "out")["eval_accuracy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_resolution": 18}, "A picture of 18 pixels is not a whole number of patches"),
        ({"eval_resolutions": [16, 30]}, "A picture of 30 pixels"),
        ({"random_crop": 0}, "--random_crop is 0"),
        ({"dataset_name": "no/such/folder"}, "Cannot load the pictures 'no/such/folder'"),
        *(
            ({option: "x"}, f"The digits have no {option.removeprefix('dataset_').removeprefix('validation_')}=x")
            for option in ("dataset_split", "image_column", "label_column", "validation_split")
        ),
        ({"random_flip": "true", "do_eval": "true"}, "--random_flip has no effect, because the run only evaluates"),
        ({"dataset_name": "docs", "dataset_config_name": "x"}, "A folder such as docs has no config_name=x"),
        ({"max_train_samples": 8}, "one update needs 16"),
        ({"scheme": "rope_nd", "scheme_options": '{"assignment": "mixd"}'}, "--scheme rope_nd"),
        ({"model_type": "llama", "config_overrides": None}, "AutoModelForImageClassification cannot build 'llama'"),
        ({"ignore_mismatched_sizes": "true"}, "--model_name_or_path"),
        ({"block_size": 3}, "Unknown option --block_size"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(tmp_path / "out", **changes) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_what_is_cut_out_depends_on_seed_epoch_and_row_alone() -> None:
    picture = torch.rand(1, 40, 30)
    augment = Augmentation(crop=0.5, flip=True, seed=1)
    shown = [augment(picture, row, epoch) for epoch in (0, 1) for row in range(20)]
    again = [augment(picture, row, epoch) for epoch in (0, 1) for row in range(20)]
    assert all(torch.equal(crop, other) for crop, other in zip(shown, again, strict=True))
    assert len({tuple(crop.shape) for crop in shown}) > 20
    assert all(0.4 < crop.numel() / picture.numel() <= 1 for crop in shown)
    assert torch.equal(Augmentation()(picture, 0, 0), picture)


def test_parts_of_the_pictures_are_disjoint() -> None:
    digits = load_pictures()
    parts = split_rows(digits, [180, 719], seed=3)
    assert [len(part) for part in parts] == [898, 180, 719]
    seen = [index for part in parts for index in part.items.indices]
    assert sorted(seen) == list(range(1797))
    with pytest.raises(SettingsError, match="none is left"):
        split_rows(digits.select(range(2)), [1, 0], 0)
