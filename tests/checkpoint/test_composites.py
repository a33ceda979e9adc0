"""Adapters and auto classes of patched models of images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText

from hf_posenc import UnsupportedError, load_position_adapter, patch_model, save_position_adapter
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import randomize
from tests.patching.composites.models import COMPOSITES
from tests.patching.composites.test_text_part import logits

LLAVA = COMPOSITES["llava"]


def test_a_position_adapter_holds_both_parts(tmp_path: Path) -> None:
    model = patch_model(patch_model(LLAVA.model(), "t5"), "t5", part="vision")
    randomize(model.position_encoding)
    prompt = LLAVA.prompt()
    save_position_adapter(model, tmp_path)
    loaded = load_position_adapter(LLAVA.model(), tmp_path)
    assert torch.equal(logits(LLAVA, loaded, **prompt), logits(LLAVA, model, **prompt))
    with pytest.raises(UnsupportedError, match="with the same scheme"):
        load_position_adapter(patch_model(LLAVA.model(), "t5"), tmp_path)


def test_lora_is_saved_with_the_schemes_of_both_parts(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel

    LLAVA.model().save_pretrained(tmp_path / "base")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    patch_model(patch_model(base, "t5"), "none", part="vision")
    adapted = add_lora(base, LoraConfig(r=2, target_modules=r".*language_model.*q_proj")).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)
    prompt = LLAVA.prompt()
    expected = logits(LLAVA, adapted, **prompt)
    adapted.save_pretrained(tmp_path / "lora")
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(stock, tmp_path / "lora").eval()
    assert torch.equal(logits(LLAVA, loaded, **prompt), expected)
    assert float((logits(LLAVA, adapted.merge_and_unload(), **prompt) - expected).abs().max()) <= 1e-4


def test_auto_classes_load_the_whole_and_its_base(tmp_path: Path) -> None:
    model = patch_model(patch_model(LLAVA.model(), "alibi"), "none", part="vision")
    model.save_pretrained(tmp_path / "llava", max_shard_size="20KB")
    assert len(list((tmp_path / "llava").glob("*.safetensors"))) > 1
    prompt = LLAVA.prompt()
    expected = logits(LLAVA, model, **prompt)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "llava", device_map="cpu").eval()
    assert torch.equal(logits(LLAVA, loaded, **prompt), expected)
    assert AutoModel.from_pretrained(tmp_path / "llava").position_encoding.config == model.position_encoding.config
    half = AutoModelForImageTextToText.from_pretrained(tmp_path / "llava", dtype=torch.bfloat16)
    assert logits(LLAVA, half, **{**prompt, "pixel_values": prompt["pixel_values"].bfloat16()}).isfinite().all()
