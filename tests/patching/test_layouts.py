"""A kind of tokens that is registered is asked wherever the kind matters; no other code knows the kinds."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from hf_posenc import inspect_model, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy import anatomy
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.layouts import Text
from tests.models import tiny

REASON = "the first step reads no positions"


class Steps(Text):
    """Steps of a model, the first of which keeps its positions."""

    left_alone = (r"^layers\.0\.", REASON)

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        return type(module).__name__.startswith("Llama")


def test_another_kind_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "_KINDS", [Steps, *anatomy._KINDS])
    model = tiny("LlamaForCausalLM").eval()
    assert inspect_model(model).stacks[0].left_alone == [f"layers.0.self_attn: {REASON}"]
    assert native_scheme(model).name == "rope"
    (report,) = patch_model(model, "alibi").position_encoding.report.stacks
    assert report.attention_layers == [1]
    assert report.kept == [f"layers.0.self_attn: {REASON}"]
    unpatch_model(model)
    assert type(Anatomy(tiny("BertForMaskedLM")).stacks()[0].layout) is Text
