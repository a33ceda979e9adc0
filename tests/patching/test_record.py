"""Changes to a patched model: the scheme is still computed, or the next call or save names the difference."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)

from hf_posenc import (
    CheckpointError,
    UnsupportedError,
    extend_context,
    inspect_model,
    patch_model,
    unpatch_model,
)
from tests.checkpoint.checkpoint_cases import edit_json
from tests.matrix.running import patched, tokens
from tests.models import SIZES, VOCABULARY, tiny
from tests.patching.composites.models import llava
from tests.patching.test_changed_layers import assert_loads
from tests.thinning import in_turn

_BERT = SIZES | {"vocab_size": VOCABULARY}


def test_weights_may_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = patched("llama_gqa", "t5")
    assert model.double()(tokens()).logits.dtype == torch.float64


# One config object for several models


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_patch_does_not_write_into_the_config_of_the_caller(nested: bool) -> None:
    kept = llava().config if nested else BertConfig(**_BERT)
    build = LlavaForConditionalGeneration if nested else AutoModelForMaskedLM.from_config
    written, holder = kept.to_json_string(), copy.deepcopy(kept)
    for scheme in ("alibi", "t5", "none"):
        model = build(kept)
        assert getattr(model, "position_encoding", None) is None
        patch_model(model, scheme)
        assert model.position_encoding.config.name == scheme or nested
        config = model.config
        assert config is not kept
        inspect_model(model)
        patch_model(model, "t5")
        assert model.config is config
        assert nested or all(module.config is config for module in model.modules() if "config" in module.__dict__)
        assert kept.to_json_string() == written
        unpatch_model(model)
        assert model.config is kept
    assert kept == holder


@pytest.mark.parametrize(
    ("value", "scheme"),
    in_turn(
        ["rope", None, {}, {"scheme": "rope"}, {"format": 2, "scheme": {"scheme": "none"}}, ...], ["alibi", "rope"]
    ),
)
@torch.no_grad()
def test_a_field_that_is_overwritten_is_named_and_written_by_the_next_patch(
    value: Any, scheme: str, tmp_path: Path
) -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 8)
    native, stock = model.config.max_position_embeddings, model(ids).logits
    extend_context(patch_model(model, "alibi"), length=native * 2)
    if value is ...:
        model.config.position_encoding["scheme"]["scheme"] = value = 3  # In place.
    else:
        model.config.position_encoding = value
    message = f"encoding is alibi, but the field 'position_encoding' .* holds .*{re.escape(str(value))}.*patch_model"
    with pytest.raises(UnsupportedError, match=message):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    inspect_model(model)
    patch_model(model, scheme)
    model.save_pretrained(tmp_path)
    assert model.config.max_position_embeddings == native * 2
    assert_loads(tmp_path, model(ids).logits, ids)
    model.config.position_encoding = value
    unpatch_model(model)
    assert not hasattr(model.config, "position_encoding")
    assert model.config.max_position_embeddings == native
    assert torch.equal(model(ids).logits, stock)


def test_a_shared_generation_config_is_not_written_to() -> None:
    model, other = patched("llama_gqa", None), patched("llama_gqa", None)
    other.generation_config = model.generation_config
    shared = model.generation_config
    before = shared.to_json_string()
    with warnings.catch_warnings(action="ignore"):
        patch_model(model, "normalized_integer")
    assert model.generation_config.use_cache is False
    assert shared.to_json_string() == before
    unpatch_model(model)
    assert model.generation_config is shared


@torch.no_grad()
def test_a_patched_base_in_another_head_is_saved_after_that_model_is_patched(tmp_path: Path) -> None:
    source, ids = patched("bert", "t5"), tokens(1, 8)
    head = BertForSequenceClassification(patched("bert", None).config).eval()
    head.bert = source.bert
    with pytest.raises(UnsupportedError, match="patch_model on this one"):
        head.save_pretrained(tmp_path)
    head.bert.pooler = BertForSequenceClassification(head.config).bert.pooler
    patch_model(head, "t5")
    expected = head(ids).logits
    head.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-4)


def test_changes_made_while_patched_stay_and_reach_nobody_else() -> None:
    kept = LlamaConfig(**_BERT)
    model = patch_model(LlamaForCausalLM(kept), "alibi")
    model.resize_token_embeddings(100)
    unpatch_model(model)
    assert (model.config.vocab_size, kept.vocab_size) == (100, 96)
    assert type(model.config) is LlamaConfig


# Fields that no longer have an effect

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scheme", ["alibi", "rope", "none"])
@torch.no_grad()
def test_a_position_field_that_is_set_or_passed_later_is_refused(scheme: str, tmp_path: Path) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"rope_parameters=.*no effect"):
        AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=_YARN)
    assert_loads(tmp_path, expected, ids)
    before = model.config.rope_parameters
    model.config.rope_parameters = _YARN
    with pytest.raises(UnsupportedError, match=r"rope_parameters=.*no effect"):
        model(ids)
    with pytest.raises(UnsupportedError, match="rope_parameters="):
        model.save_pretrained(tmp_path)
    assert "rope_parameters" in inspect_model(model).disagreement
    model.config.rope_parameters = before
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(("name", "where", "changes"), [
    ("llama_gqa", ("rope_parameters",), {"rope_theta": 500000.0}),
    ("llama_gqa", (), {"partial_rotary_factor": 0.5}),
    ("t5_encoder", (), {"relative_attention_max_distance": 16}),
])  # fmt: skip
def test_a_position_field_edited_in_the_file_is_refused(
    name: str, where: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = patched(name, "alibi")
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", *where, **changes)
    with pytest.raises(CheckpointError, match="no effect"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "value", ["alibi", ["alibi", "t5"], {"scheme": "t5"}, {"format": "x", "scheme": {"scheme": "alibi"}}]
)
def test_a_stock_config_that_asks_for_a_scheme_is_not_ignored(value: Any) -> None:
    config = LlamaConfig(**_BERT)
    config.position_encoding = value
    for build in (LlamaForCausalLM, AutoModelForCausalLM.from_config):
        with pytest.raises(UnsupportedError, match=r"position_encoding=.*patch_model"):
            build(config)


# Freezing


def test_freezing_an_encoder_freezes_its_scheme() -> None:
    model = patch_model(patch_model(tiny("WhisperForConditionalGeneration"), "t5"), "t5", part="audio")
    model.freeze_encoder()
    trained = {name for name, one in model.named_parameters() if one.requires_grad and "position_encoding" in name}
    assert trained
    assert not any(".encoder." in name.partition("stacks")[2] for name in trained)
    encoder = model.get_encoder()
    assert len([*encoder.parameters()]) > len([*encoder.named_parameters()])
    assert len({*map(id, model.parameters())}) == len([*model.parameters()])
    unpatch_model(model)
    assert "parameters" not in encoder.__dict__


def test_what_was_frozen_or_thawed_while_patched_stays_so() -> None:
    model = patched("gpt2", "alibi")
    model.requires_grad_(False)
    unpatch_model(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    patch_model(model, "alibi")
    model.requires_grad_(True)
    unpatch_model(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    patch_model(model, "alibi")
    unpatch_model(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fields_that_only_contain_such_a_word_are_no_position_fields() -> None:
    config = LlamaConfig(**_BERT, composition="a", properties=3)
    model = patch_model(LlamaForCausalLM(config).eval(), "alibi")
    model.config.composition, model.config.properties = "b", 4
    model(tokens(1, 4))


@pytest.mark.parametrize("change", [unpatch_model, lambda model: patch_model(model, "t5")], ids=["unpatch", "patch"])
@torch.no_grad()
def test_a_scheme_is_not_changed_during_a_call(change: Any) -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    expected = model(ids).logits
    refusal = pytest.raises(UnsupportedError, match="call of this LlamaForCausalLM is in progress")
    with model.model.layers[0].register_forward_hook(lambda *_: change(model) and None), refusal:
        model(ids)
    assert torch.equal(model(ids).logits, expected)
    change(model)


@torch.no_grad()
def test_a_backend_chosen_while_patched_stays() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    before = model.config._attn_implementation
    chosen = "eager" if before == "sdpa" else "sdpa"
    model.set_attn_implementation(chosen)
    unpatch_model(model)
    assert model.config._attn_implementation == chosen
    stock = patched("llama_gqa", None)
    stock.set_attn_implementation(chosen)
    assert torch.equal(model(ids).logits, stock(ids).logits)
