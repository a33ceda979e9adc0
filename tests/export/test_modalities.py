"""Exports of models of images and sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPModel,
    CLIPTextModel,
    SiglipModel,
    SiglipTextModel,
)

from hf_posenc import LinearScaling, PRopeConfig, RopeConfig, SchemeConfig, UnsupportedError, export_model, patch_model
from hf_posenc.recipes import swap_scheme
from tests.models import tiny
from tests.patching.composites.models import COMPOSITES
from tests.patching.composites.test_text_part import logits
from tests.patching.vision.models import vit

LLAVA = COMPOSITES["llava"]
#: By the class of the text part: the class of the model, and the rows of its table.
DUAL_ENCODERS = {CLIPTextModel: (CLIPModel, 77), SiglipTextModel: (SiglipModel, 64)}


LINEAR = RopeConfig(theta=500.0, scaling=LinearScaling(factor=2.0))


@pytest.mark.parametrize(
    ("name", "scheme", "carrier"),
    [("llava", LINEAR, "config of"), ("gemma3", LINEAR, "config of"), ("llava", PRopeConfig(theta=500.0), "factors")],
)
def test_a_rotation_of_the_text_part_is_a_stock_checkpoint(
    name: str, scheme: SchemeConfig, carrier: str, tmp_path: Path
) -> None:
    composite = COMPOSITES[name]
    model = patch_model(composite.model(), scheme)
    assert carrier in export_model(model, tmp_path / "stock").carrier
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "stock").eval()
    assert not hasattr(loaded, "position_encoding")
    prompt = composite.prompt(images=2)
    found, expected = logits(composite, loaded, **prompt), logits(composite, model, **prompt)
    assert float((found - expected).abs().max()) <= 1e-5


def test_buffers_are_rounded_as_in_the_stock_model(tmp_path: Path) -> None:
    """The factor of Gemma's embeddings is a buffer, which bfloat16 rounds."""
    model = patch_model(COMPOSITES["gemma3"].model(), RopeConfig(theta=300.0)).bfloat16()
    assert all(check.difference == 0 for check in export_model(model, tmp_path / "stock").checks)


def dual_encoder(model_class: Any, rows: int) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 99, "max_position_embeddings": rows, "bos_token_id": 97, "eos_token_id": 98}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    config = model_class.config_class(text_config=text, vision_config=vision)
    return model_class(config).eval()


@pytest.mark.parametrize(("model_class", "rows"), DUAL_ENCODERS.values())
def test_text_past_the_table_of_a_model_that_compares_it_with_images(
    model_class: Any, rows: int, tmp_path: Path
) -> None:
    """Long-CLIP's table, saved, loaded, in a pipeline's call, and as a stock checkpoint."""
    model = dual_encoder(model_class, rows)
    ids = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 98
    inputs = {"pixel_values": torch.rand(2, 3, 16, 16)}
    with torch.no_grad():
        short = model(input_ids=ids[:, -18:], **inputs).logits_per_image
        with pytest.raises(ValueError, match="Sequence length must be less than"):
            model(input_ids=ids, **inputs)
        swap_scheme(model, "learned", num_positions=248, table_extension="long_clip", part="text")
        assert torch.equal(model(input_ids=ids[:, -18:], **inputs).logits_per_image, short)
        expected = model(input_ids=ids, **inputs).logits_per_image
        assert [check.quantity for check in export_model(model, tmp_path / "stock").checks] == ["outputs of text_model"]
        model.save_pretrained(tmp_path / "patched")
        for folder in ("stock", "patched"):
            loaded = model_class.from_pretrained(tmp_path / folder).eval()
            assert hasattr(loaded, "position_encoding") == (folder == "patched")
            assert torch.allclose(loaded(input_ids=ids, **inputs).logits_per_image, expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("model_class", [CLIPTextModel, SiglipTextModel])
def test_a_text_model_past_its_table_in_onnx_runtime(model_class: Any, tmp_path: Path) -> None:
    model = model_class(dual_encoder(*DUAL_ENCODERS[model_class]).config.text_config).eval()
    swap_scheme(model, "learned", num_positions=248, table_extension="long_clip")
    report = export_model(model, tmp_path / "program", to="onnx")
    assert all(check.equal for check in report.checks)


def test_a_rotation_that_agrees_only_on_text_is_no_stock_checkpoint(tmp_path: Path) -> None:
    qwen = COMPOSITES["qwen2_vl"]
    export_model(patch_model(qwen.model(), "native"), tmp_path / "native")
    for scheme in (RopeConfig(theta=100.0), "p_rope"):
        with pytest.raises(UnsupportedError, match="coordinates of images"):
            export_model(patch_model(qwen.model(), scheme), tmp_path / "stock")


def test_what_a_stock_config_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no such logit bias") as refused:
        export_model(patch_model(LLAVA.model(), "alibi"), tmp_path / "stock")
    assert "onnx" not in str(refused.value)
    with pytest.raises(UnsupportedError, match="The part 'vision' of this Llava"):
        export_model(patch_model(LLAVA.model(), "none", part="vision"), tmp_path / "stock")


@pytest.mark.parametrize("target", ["onnx", "gguf"])
def test_a_program_for_text_would_lose_the_images(target: str, tmp_path: Path) -> None:
    for model in (LLAVA.model(), patch_model(LLAVA.model(), "alibi")):
        with pytest.raises(UnsupportedError, match=r"would lose the part 'vision'.*get_text_config"):
            export_model(model, tmp_path / "program", to=target)
    with pytest.raises(UnsupportedError, match="reads no token ids"):
        export_model(patch_model(vit(), "none"), tmp_path / "program", to=target)
    assert not (tmp_path / "program").exists()


def test_models_without_token_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"reads 'pixel_values'\. save_pretrained saves"):
        export_model(patch_model(vit(), "none"), tmp_path / "stock")
    with pytest.raises(UnsupportedError, match="stock positions, so save_pretrained is enough"):
        export_model(vit(), tmp_path / "stock")
    for to, reason in (("stock", "reads 'input_features'"), ("onnx", "would lose the part 'audio'")):
        with pytest.raises(UnsupportedError, match=reason):
            export_model(patch_model(speech_model(), "alibi"), tmp_path / "stock", to=to)


def speech_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "max_source_positions": 20, "max_target_positions": 40}
    return tiny("WhisperForConditionalGeneration", encoder_layers=1, decoder_layers=1, **sizes).eval()


def test_the_language_model_of_its_own_can_be_exported(tmp_path: Path) -> None:
    model = LLAVA.model()
    text = AutoModelForCausalLM.from_config(model.config.get_text_config()).eval()
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    patch_model(text, "rope", theta=500.0)
    patch_model(model, "rope", theta=500.0)
    ids = torch.arange(10, 30).unsqueeze(0)
    assert torch.equal(text(ids).logits, model(ids).logits)
    assert export_model(text, tmp_path / "text").checks
    with pytest.raises(UnsupportedError, match="does not hold itself"):
        export_model(model.model.language_model, tmp_path / "inside", to="onnx")
