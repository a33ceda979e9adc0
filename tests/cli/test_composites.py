"""`hf-posenc inspect` and `hf-posenc patch` of models of images and sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    LlavaProcessor,
    ViTImageProcessorPil,
)

from hf_posenc.cli import main
from hf_posenc.loading import model_class
from tests.export.test_modalities import speech_model
from tests.models import word_tokenizer
from tests.patching.composites.models import COMPOSITES
from tests.patching.vision.models import vit

from .running import refused


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llava")
    COMPOSITES["llava"].model().save_pretrained(folder)
    tokenizer = word_tokenizer({"[UNK]": 0, "dog": 10, "<image>": 3})
    LlavaProcessor(CLIPImageProcessorPil(), tokenizer, patch_size=4).save_pretrained(folder)
    return str(folder)


def test_one_part_is_patched_and_then_the_other(llava: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["patch", llava, "none", "--part", "vision", "--output", first]) == 0
    printed = capsys.readouterr().out
    assert "part: vision; text unchanged" in printed
    assert "Saved the model and its processor" in printed
    assert main(["inspect", first]) == 0
    assert "in force: vision: none; " in capsys.readouterr().out
    assert main(["patch", first, "alibi", "--output", second]) == 0
    model = AutoModelForImageTextToText.from_pretrained(second)
    assert model.position_encoding.config.names == ("text", "vision")
    assert isinstance(AutoProcessor.from_pretrained(second), LlavaProcessor)
    capsys.readouterr()
    assert "already has the position encoding none" in refused(
        capsys, "patch", second, "alibi", "--part", "vision", "--output", str(tmp_path / "third")
    )


def test_the_parts_are_listed(llava: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", llava]) == 0
    printed = capsys.readouterr().out
    assert "native scheme of part 'vision': learned(" in printed


def test_a_classifier_of_images_keeps_its_head_and_its_image_processor(tmp_path: Path) -> None:
    source, output = tmp_path / "stock", tmp_path / "patched"
    vit().save_pretrained(source)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(source)
    assert main(["patch", str(source), "rope_nd", "--output", str(output)]) == 0
    model = AutoModelForImageClassification.from_pretrained(output).eval()
    assert model.position_encoding.config.name == "rope_nd"
    assert torch.equal(model.classifier.weight, vit().classifier.weight)
    before, after = (ViTImageProcessorPil.from_pretrained(folder).to_dict() for folder in (source, output))
    assert after == before


def test_every_model_has_the_loader_that_keeps_its_head() -> None:
    models = [speech_model(), vit(), *(row.build() for row in COMPOSITES.values())]
    for model in models:
        for stock in (model, model.base_model):
            config = stock.config
            config.architectures = [type(stock).__name__]
            with torch.device("meta"):
                assert type(model_class(config)._from_config(config)) is type(stock)
