"""The evaluations of models of images, from the command line: no tokenizer is loaded for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hf_posenc.cli import main
from hf_posenc.report import Result

from .running import refused


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    folder = tmp_path_factory.mktemp("vit")
    config = ViTConfig(**sizes, image_size=32, patch_size=4, num_labels=10, initializer_range=0.2)
    ViTForImageClassification(config).save_pretrained(folder)
    return str(folder)


def test_two_dogs_in_one_picture(vit, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["eval", "picture-dog", vit, "--schemes", "native", "none", "alibi:axes=2", "rope_nd"]
    assert main([*words, "--json", "--plot", str(tmp_path / "dogs.png")]) == 0
    result = Result.from_dict(json.loads(capsys.readouterr().out))
    assert [result.record(label, "told_apart").passed for label in result.labels] == [True, False, True, True]
    assert (tmp_path / "dogs.png").stat().st_size > 0
    result.save(tmp_path / "dogs.json")
    assert main(["report", str(tmp_path / "dogs.json"), "--plot", str(tmp_path / "again.png"), "--dark"]) == 0
    assert (tmp_path / "again.png").stat().st_size > 0


def test_the_figure_has_the_picture_and_a_line_for_each_scheme(vit):
    pytest.importorskip("matplotlib")
    from hf_posenc.loading import load_model
    from hf_posenc.metrics import picture_dog_test
    from hf_posenc.plots.dog import plot_picture_dog

    result = picture_dog_test(load_model(vit), ["none", "rope_nd"], first=(0, 0), second=(6, 2))
    picture, lines = plot_picture_dog(result).axes
    assert len(picture.patches) == 2
    assert [patch.get_xy() for patch in picture.patches] == [(0, 0), (2, 6)]
    drawn = {line.get_label(): list(line.get_ydata()) for line in lines.get_lines()}
    assert drawn["rope_nd"][1:] == [record.value for record in result.of("rope_nd", "relative_l2")][1:]
    assert max(drawn["none"]) < result.settings["tolerance"]
    nothing = Result.from_dict(result.to_dict() | {"records": []})
    with pytest.raises(ValueError, match="Nothing to plot"):
        plot_picture_dog(nothing)


def test_equal_patches_and_accuracy_by_resolution(vit, capsys):
    assert (
        main(["eval", "image-sensitivity", vit, "--schemes", "none", "rope_nd", "--steps", "2", "--images", "2"]) == 0
    )
    rows = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if line}
    assert (rows["none"], rows["rope_nd"]) == ("no", "yes")
    assert main(["eval", "resolution", vit, "--resolutions", "24", "48", "--max-pictures", "20"]) == 0
    assert "48 pixels (%)" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("dog",), ("loss", "--text", "text.txt")])
def test_a_text_is_not_measured_on_images(vit, capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The dog chased another dog.")
    message = refused(capsys, "eval", words[0], vit, *words[1:])
    assert "reads 'pixel_values'" in message
    for instead in ("picture-dog", "image-sensitivity", "resolution"):
        assert instead in message


def test_bad_requests(vit, capsys):
    assert "not a whole number of patches" in refused(capsys, "eval", "resolution", vit, "--resolutions", "30")
    assert "overlap" in refused(capsys, "eval", "picture-dog", vit, "--first", "1", "1", "--second", "1", "2")
    missing = refused(capsys, "eval", "resolution", vit, "--resolutions", "32", "--dataset", str(Path(vit) / "none"))
    assert "Cannot load the pictures" in missing
