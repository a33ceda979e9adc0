"""PEFT's adaption prompts, which compute the queries of a layer again, in patched models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
from peft import AdaptionPromptConfig, PeftModel, get_peft_model

from hf_posenc import UnsupportedError, native_scheme, patch_model
from tests.models import tiny

IDS = torch.arange(3, 15)[None]


def prompted(model: Any) -> Any:
    wrapped = get_peft_model(model, AdaptionPromptConfig(adapter_layers=2, adapter_len=4, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "adaption" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM"])
class TestPrompts:
    def test_in_the_native_scheme_they_are_those_of_the_stock_model(self, kind: str) -> None:
        model = tiny(kind).eval()
        stock = prompted(copy.deepcopy(model))
        patch_model(model, native_scheme(model))
        # The same operations; a placed mapping rotates in another order.
        torch.testing.assert_close(logits(prompted(model)), logits(stock), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("scheme", ["alibi", "t5", "sinusoidal"])
    def test_they_act_decode_and_come_back(self, kind: str, scheme: str, tmp_path: Path) -> None:
        model = tiny(kind).eval()
        base = copy.deepcopy(model)
        patch_model(model, scheme)
        before = logits(model)
        wrapped = prompted(model)
        assert (logits(wrapped) - before).abs().max() > 1e-4
        tokens = wrapped.generate(input_ids=IDS, max_new_tokens=5, do_sample=False)
        whole = wrapped(tokens).logits[:, IDS.shape[1] - 1 : -1].argmax(-1)
        assert torch.equal(whole, tokens[:, IDS.shape[1] :])
        wrapped.save_pretrained(tmp_path)
        torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path)), logits(wrapped), rtol=0, atol=0)


def test_a_rotation_they_cannot_follow_is_refused_and_so_is_a_change_under_them() -> None:
    model = tiny("LlamaForCausalLM")
    with pytest.raises(UnsupportedError, match="adaption prompts"):
        prompted(patch_model(model, "rope", theta=123.0))
    with pytest.raises(UnsupportedError, match="remove them first"):
        patch_model(prompted(tiny("LlamaForCausalLM")), "alibi")
