"""Several parts with schemes of their own: placing, removing, saving, training."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaForCausalLM

from hf_posenc import PartsConfig, UnsupportedError, inspect_model, patch_model, unpatch_model
from tests.fresh import run_fresh

from .models import COMPOSITES
from .test_text_part import _stir, logits

LLAVA = COMPOSITES["llava"]

#: Loads a saved model and compares its logits. The folder is the first argument.
_LOADING = """
import sys
import torch, hf_posenc
from transformers import AutoModelForImageTextToText
expected, prompt = torch.load(sys.argv[1] + "/expected.pt")
prompt.pop("mm_token_type_ids")
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1] + "/model").eval()
with torch.no_grad():
    assert torch.equal(model(**prompt).logits, expected)
assert model.position_encoding.config.names == ("text", "vision")
"""


def test_two_parts_have_two_schemes_and_the_second_call_keeps_the_first() -> None:
    model = LLAVA.model()
    prompt = LLAVA.prompt()
    stock = logits(LLAVA, model, **prompt)
    patch_model(model, "t5")
    _stir(model)
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
    unpatch_model(model, part="text")
    assert torch.equal(logits(LLAVA, model, **prompt), stock)
    assert not hasattr(model, "position_encoding")


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


@pytest.mark.on_cpu("the other process computes on the CPU")
def test_the_whole_is_saved_and_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    model = patch_model(patch_model(LLAVA.model(), "t5"), "none", part="vision")
    _stir(model)
    prompt = LLAVA.prompt()
    expected = logits(LLAVA, model, **prompt)
    model.save_pretrained(tmp_path / "model")
    torch.save((expected, prompt), tmp_path / "expected.pt")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(logits(LLAVA, loaded, **prompt), expected)
    done = run_fresh(_LOADING, tmp_path)
    assert done.returncode == 0, done.stderr
    with pytest.raises(UnsupportedError, match="describes only a part"):
        LlamaForCausalLM.from_pretrained(tmp_path / "model")


def test_lora_trains_on_a_patched_part(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, PeftModel, get_peft_model

    model = patch_model(LLAVA.model(), "alibi")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=r".*language_model.*q_proj"))
    prompt = {key: value for key, value in LLAVA.prompt().items() if key != "mm_token_type_ids"}
    optimizer = torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=0.5)
    before = float(adapted(**prompt, labels=prompt["input_ids"]).loss)
    for _ in range(3):
        loss = adapted(**prompt, labels=prompt["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    assert float(adapted(**prompt, labels=prompt["input_ids"]).loss) < before
    expected = logits(LLAVA, adapted, **prompt)
    adapted.save_pretrained(tmp_path)
    fresh = patch_model(LLAVA.model(), "alibi")
    fresh.load_state_dict(base)
    assert torch.equal(logits(LLAVA, PeftModel.from_pretrained(fresh, tmp_path).eval(), **prompt), expected)


def test_the_inspection_lists_the_parts() -> None:
    found = inspect_model(LLAVA.model())
    assert {stack.part for stack in found.stacks} == {"text", "vision"}
    assert isinstance(found.native, dict)
    assert found.native["scheme"] == "rope"
    assert isinstance(found.other_parts["vision"], dict)
    assert found.other_parts["vision"]["scheme"] == "learned"


def test_the_warning_about_patches_in_one_row_is_not_repeated_for_a_kept_part() -> None:
    model = LLAVA.model()
    with pytest.warns(UserWarning, match="numbered row by row"):
        patch_model(model, "alibi", part="vision")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, "alibi")
