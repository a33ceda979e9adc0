"""Several parts with separate schemes: placing, removing, saving, training."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hf_posenc import PartsConfig, extend_context, inspect_model, native_scheme, patch_model, unpatch_model
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.matrix.running import drawn

from .models import COMPOSITES
from .test_text_part import logits

LLAVA = COMPOSITES["llava"]


def test_two_parts_have_two_schemes_and_the_second_call_keeps_the_first(tmp_path: Path) -> None:
    model = LLAVA.model()
    prompt = LLAVA.prompt()
    stock = logits(LLAVA, model, **prompt)
    drawn(patch_model(model, "t5"))
    trained = {name: value.clone() for name, value in model.position_encoding.state_dict().items() if value.dim()}
    with_text = logits(LLAVA, model, **prompt)
    patch_model(model, "none", part="vision")
    assert model.position_encoding.config.by_part().keys() == {"text", "vision"}
    for name, value in trained.items():
        if name in model.position_encoding.state_dict() and "extra_state" not in name:
            assert torch.equal(model.position_encoding.state_dict()[name], value)
    with_both = logits(LLAVA, model, **prompt)
    assert float((with_both - with_text).abs().max()) > 1e-4
    unpatch_model(model, part="vision")
    assert torch.equal(logits(LLAVA, model, **prompt), with_text)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(LLAVA, loaded, **prompt), with_text)
    patch_model(model, "none", part="vision")
    assert torch.equal(logits(LLAVA, model, **prompt), with_both)
    patch_model(unpatch_model(model, part="vision"), "native", part="vision")
    assert torch.equal(logits(LLAVA, model, **prompt), with_text)
    unpatch_model(unpatch_model(model, part="vision"), part="text")
    assert torch.equal(logits(LLAVA, model, **prompt), stock)
    assert not hasattr(model, "position_encoding")


def test_a_length_goes_with_the_scheme_of_its_part() -> None:
    """The warning about patches in one row is not repeated for a part that is kept."""
    model = LLAVA.model()
    with pytest.warns(UserWarning, match="numbered row by row"):
        patch_model(model, "alibi", part="vision")
    with warnings.catch_warnings(action="error"):
        patch_model(model, "alibi")
    native = model.config.text_config.max_position_embeddings
    extend_context(model, length=native + 7, part="text")
    unpatch_model(model, part="text")
    assert f"{native + 7}" not in str(model.position_encoding.report)
    patch_model(model, "alibi")
    assert model.config.text_config.max_position_embeddings == native


def test_a_part_has_several_towers_whose_places_a_run_shows() -> None:
    """They may also have parameters without numbers, here those of no register tokens."""
    model, tower = tiny_model(pair_named("image-text-video_llava")), tiny_model(pair_named("vision-dinov3_vit"))
    model.model.video_tower, model.model.image_tower = tower, copy.deepcopy(tower)
    model.config.vision_config = tower.config
    assert native_scheme(model, part="vision").name == "rope_nd"
    patch_model(model, "native", part="vision")
    assert {*model.position_encoding.stacks} == {"video_tower", "image_tower"}


def test_a_config_of_parts_places_them_together() -> None:
    one, other = LLAVA.model(), LLAVA.model()
    patch_model(one, "alibi")
    patch_model(one, "none", part="vision")
    patch_model(other, PartsConfig(names=("vision", "text"), schemes=("none", "alibi")))
    assert one.position_encoding.config.by_part() == other.position_encoding.config.by_part()
    prompt = LLAVA.prompt()
    assert torch.equal(logits(LLAVA, one, **prompt), logits(LLAVA, other, **prompt))
    with pytest.raises(ValueError, match="names the parts"):
        patch_model(other, PartsConfig(names=("text",), schemes=("none",)), part="text")


def test_the_inspection_lists_the_parts_and_the_report_those_without_a_scheme() -> None:
    found = inspect_model(LLAVA.model())
    assert {stack.part for stack in found.stacks} == {"text", "vision"}
    assert (found.native["scheme"], found.other_parts["vision"]["scheme"]) == ("rope", "learned")
    report = patch_model(LLAVA.model(), "alibi").position_encoding.report
    assert {stack.part for stack in report.stacks} == {"text"}
    assert "vision" in report.untouched
    assert "text" in str(report)
