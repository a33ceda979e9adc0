"""What others do to a patched model: the scheme is still computed, or the next call or save names what differs."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_posenc import (
    CheckpointError,
    UnsupportedError,
    inspect_model,
    list_schemes,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.matrix.running import patched, tokens
from tests.patching.audio.families import WHISPER
from tests.patching.composites.models import llava


def own_attention(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """An attention without a scheme: the mean of the values."""
    value = self.v_proj(hidden_states).mean(1, keepdim=True).repeat(1, hidden_states.shape[1], 2)
    return self.o_proj(value), None


def _attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


def _assert_loads(folder: Path, expected: torch.Tensor, ids: torch.Tensor) -> None:
    """A loaded model has another attention backend, which rounds differently."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)


# An own forward, on the instance or the class


def _replace_on_instance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = _attention(model)
    attention.forward = own_attention.__get__(attention)


def _replace_by_partial(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = _attention(model)
    attention.forward = functools.partial(own_attention, attention)


def _replace_inside_a_hook(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    attention = _attention(model)
    add_hook_to_module(attention, ModelHook())
    attention.forward = own_attention.__get__(attention)


def _replace_on_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(_attention(model)), "forward", own_attention)


def _replace_rotary_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = model.model.rotary_emb
    rotary.forward = type(rotary).forward.__get__(rotary)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("replace", [
    _replace_on_instance, _replace_by_partial, _replace_inside_a_hook, _replace_on_class, _replace_rotary_forward
])  # fmt: skip
@pytest.mark.parametrize("scheme", ["alibi", "rope"])
@torch.no_grad()
def test_a_forward_that_bypasses_the_scheme_is_refused_at_the_next_call_and_save(
    scheme: str, replace: Any, called_before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    if called_before:
        model(ids)
    replace(model, monkeypatch)
    for action in (lambda: model(ids), lambda: model.save_pretrained(tmp_path / "folder"), lambda: model(ids)):
        with pytest.raises(UnsupportedError, match="was replaced after patch_model"):
            action()
    assert "was replaced" in model.position_encoding.record.agrees(model)
    assert not (tmp_path / "folder").exists()


def _with_wraps(inner: Any, module: Any) -> Any:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return forward


def _with_attribute(inner: Any, module: Any) -> Any:
    module.original_forward = inner

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.original_forward(*args, **kwargs)

    return forward.__get__(module)


class _Timed:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrapper", [_with_wraps, _with_attribute, lambda inner, _: _Timed(inner)])
@torch.no_grad()
def test_a_wrapper_that_calls_the_placed_forward_is_accepted(wrapper: Any, tmp_path: Path) -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.forward = wrapper(layer.self_attn.forward, layer.self_attn)
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    _assert_loads(tmp_path, expected, ids)


# Layers


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
@torch.no_grad()
def test_a_layer_of_another_patched_model_is_refused(scheme: str, tmp_path: Path) -> None:
    model, other, ids = patched("llama_gqa", scheme), patched("llama_gqa", "t5"), tokens(1, 8)
    model(ids)
    model.model.layers[0] = other.model.layers[0]
    for action in (lambda: model(ids), lambda: model.save_pretrained(tmp_path / "folder")):
        with pytest.raises(UnsupportedError, match="was moved here from another patched model"):
            action()
    unpatch_model(other)
    patch_model(model, scheme)
    model(ids)


@pytest.mark.parametrize("scheme", [None, "t5"])
def test_an_encoder_of_another_model_is_not_saved_with_the_scheme_of_this_one(
    scheme: str | None, tmp_path: Path
) -> None:
    model = patched("bart", "alibi")
    model.model.encoder = patched("bart", scheme).model.encoder
    message = "its BartEncoder was exchanged after patch_model"
    with pytest.raises(UnsupportedError, match=message):
        model.save_pretrained(tmp_path)
    if scheme is None:
        assert message in inspect_model(model).disagreement


def test_a_stock_base_under_the_config_of_a_patched_model_is_named(tmp_path: Path) -> None:
    model = patched("llama_gqa", "alibi")
    model.model = patched("llama_gqa", None).model
    message = "it uses its stock positions, but its config names the scheme 'alibi'"
    with pytest.raises(UnsupportedError, match=message):
        model.save_pretrained(tmp_path)
    assert message in inspect_model(model).disagreement


def _moved(model: Any, order: list[int]) -> None:
    model.model.layers = nn.ModuleList([model.model.layers[index] for index in order])
    model.config.num_hidden_layers = len(order)


@pytest.mark.parametrize("order", [[1, 0], [1], [0, 1, 0]], ids=["swapped", "dropped", "repeated"])
@pytest.mark.parametrize("scheme", [{"scheme": "alibi"}, {"scheme": "t5"}, {"scheme": "forget_gate"}, {
    "scheme": "schedule", "layers": [{"scheme": "none"}, {"scheme": "alibi"}]
}], ids=lambda scheme: scheme["scheme"])  # fmt: skip
@torch.no_grad()
def test_a_model_with_moved_layers_is_loaded_as_it_is_or_not_saved(
    scheme: Any, order: list[int], tmp_path: Path
) -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 8)
    patch_model(model, scheme)
    for parameter in model.model.position_encoding.parameters():
        parameter.normal_()
    _moved(model, order)
    expected = model(ids, use_cache=False).logits
    # transformers itself saves no layer twice.
    refusal = r"Call patch_model again" if scheme["scheme"] in ("schedule", "forget_gate") else "shared tensors"
    if refusal != "shared tensors" or order == [0, 1, 0]:
        with pytest.raises((UnsupportedError, RuntimeError), match=refusal):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    _assert_loads(tmp_path, expected, ids)


@pytest.mark.parametrize("scheme", sorted({*list_schemes()} & {
    "alibi", "t5", "fire", "forget_gate", "cope", "learned", "sinusoidal", "rope", "none", "kerple"
}))  # fmt: skip
@torch.no_grad()
def test_moved_layers_keep_their_own_parameters_when_the_scheme_is_placed_again(scheme: str) -> None:
    model, ids = patched("llama_gqa", scheme, num_hidden_layers=3), tokens(1, 8)
    for parameter in model.model.position_encoding.parameters():
        parameter.normal_()
    _moved(model, [2, 0])
    if scheme in ("learned", "sinusoidal"):
        with pytest.raises(UnsupportedError, match="no longer the first layer"):
            model(ids, use_cache=False)
        additive = [*model.model.position_encoding.parameters()]
        patch_model(model, scheme)
        assert all(map(torch.equal, additive, model.model.position_encoding.parameters()))
        return
    expected = model(ids, use_cache=False).logits
    patch_model(model, scheme)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_layer_copied_inside_the_model_computes_the_scheme_and_is_unpatched_with_it() -> None:
    stock, model, ids = patched("llama_gqa", None), patched("llama_gqa", "alibi"), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for one in (stock, model):
        one.model.layers[1] = copy.deepcopy(one.model.layers[0])
    again = patched("llama_gqa", None)
    again.model.layers[1] = copy.deepcopy(again.model.layers[0])
    patch_model(again, "alibi")
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert torch.equal(model(**inputs).logits, again(**inputs).logits)
    unpatch_model(model)
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


# The same scheme again


@pytest.mark.parametrize("scheme", ["t5", "fire", "learned", "forget_gate", "alibi"])
def test_the_scheme_in_force_placed_again_keeps_its_parameters(scheme: str) -> None:
    model = patched("llama_gqa", scheme)
    before = dict(model.model.position_encoding.named_parameters())
    patch_model(model, scheme)
    after = dict(model.model.position_encoding.named_parameters())
    assert [*before] == [*after]
    assert all(before[name] is after[name] for name in before)


def test_other_options_are_another_scheme() -> None:
    model = patched("llama_gqa", "t5")
    before = [*model.model.position_encoding.parameters()]
    patch_model(model, "t5", num_buckets=16)
    assert not {*map(id, before)} & {*map(id, model.model.position_encoding.parameters())}


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
        assert model.config is not kept
        assert kept.to_json_string() == written
        unpatch_model(model)
        assert model.config is kept
    assert kept == holder


_BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


def test_the_config_of_a_patched_model_stays_the_same_object() -> None:
    model = patched("llama_gqa", "alibi")
    config = model.config
    inspect_model(model)
    patch_model(model, "t5")
    assert model.config is config
    assert all(module.config is config for module in model.modules() if "config" in module.__dict__)


def test_a_shared_generation_config_is_not_written_to() -> None:
    model, other = patched("llama_gqa", None), patched("llama_gqa", None)
    other.generation_config = model.generation_config
    shared = model.generation_config
    before = shared.to_json_string()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    _assert_loads(tmp_path, expected, ids)
    before = model.config.rope_parameters
    model.config.rope_parameters = _YARN
    with pytest.raises(UnsupportedError, match=r"rope_parameters=.*no effect"):
        model(ids)
    with pytest.raises(UnsupportedError, match="rope_parameters="):
        model.save_pretrained(tmp_path)
    assert "rope_parameters" in inspect_model(model).disagreement
    model.config.rope_parameters = before
    assert torch.equal(model(ids).logits, expected)


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    import json

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


@pytest.mark.parametrize(("name", "edit"), [
    ("llama_gqa", _edited(lambda config: config["rope_parameters"].update(rope_theta=500000.0))),
    ("llama_gqa", _edited(lambda config: config.update(partial_rotary_factor=0.5))),
    ("t5_encoder", _edited(lambda config: config.update(relative_attention_max_distance=16))),
])  # fmt: skip
def test_a_position_field_edited_in_the_file_is_refused(name: str, edit: Any, tmp_path: Path) -> None:
    model = patched(name, "alibi")
    model.save_pretrained(tmp_path)
    edit(tmp_path)
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


@pytest.mark.parametrize("value", ["1d-conv", None, {"kind": "alibi"}, 3])
def test_a_field_of_another_project_is_left_alone(value: Any) -> None:
    config = LlamaConfig(**_BERT)
    config.position_encoding = value
    assert LlamaForCausalLM(config).config.position_encoding == value


# Freezing


def test_freezing_an_encoder_freezes_its_scheme() -> None:
    model = patch_model(
        patch_model(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)), "t5"), "t5", part="audio"
    )
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


@torch.no_grad()
def test_copies_and_pickles_have_a_record_of_their_own() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, model(ids).logits)
        assert other.position_encoding.record.agrees(other) == ""
        other.config.rope_parameters = _YARN
        with pytest.raises(UnsupportedError, match="rope_parameters"):
            other(ids)
        model(ids)
        unpatch_model(other)
        assert type(other.config) is LlamaConfig


@torch.no_grad()
def test_a_copied_layer_keeps_the_parameters_of_its_original_when_the_scheme_is_placed_again() -> None:
    model, ids = patched("llama_gqa", "forget_gate"), tokens(1, 8)
    for parameter in model.model.position_encoding.parameters():
        parameter.normal_()
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    expected = model(ids, use_cache=False).logits
    patch_model(model, "forget_gate")
    assert torch.equal(model(ids, use_cache=False).logits, expected)


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
    handle = model.model.layers[0].register_forward_hook(lambda *_: change(model) and None)
    with pytest.raises(UnsupportedError, match="call of this LlamaForCausalLM is in progress"):
        model(ids)
    handle.remove()
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


_CHANGES: dict[str, Callable[[Any], None]] = {
    "the first layer is dropped": lambda layers: layers.pop(0),
    "the last layer is dropped": lambda layers: layers.pop(-1),
    "a layer is repeated": lambda layers: layers.append(layers[0]),
    "a layer is copied": lambda layers: layers.append(copy.deepcopy(layers[0])),
    "layers are exchanged": lambda layers: layers.insert(0, layers.pop(-1)),
}


@pytest.mark.parametrize("read", [inspect_model, native_scheme])
@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "t5"])
@pytest.mark.parametrize("change", _CHANGES)
@torch.no_grad()
def test_reading_a_model_whose_layers_changed_leaves_it_as_it_is(change: str, scheme: str, read: Any) -> None:
    def outcome() -> Any:
        try:
            return model(ids, use_cache=False).logits
        except UnsupportedError as error:
            return str(error)

    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    _CHANGES[change](model.model.layers)
    before = outcome()
    once = change == "a layer is repeated" and scheme == "t5"  # The layers are the same ones.
    if read is inspect_model:
        assert bool(inspect_model(model).disagreement) != once
    elif not once:
        with pytest.raises(UnsupportedError, match="is not as it was patched"):
            read(model)
    after = outcome()
    assert torch.equal(after, before) if isinstance(before, Tensor) else after == before
    if change != "a layer is repeated":  # Positions cannot be added at the first use of a layer only.
        patch_model(model, scheme)
        assert not inspect_model(model).disagreement


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
@torch.no_grad()
def test_a_copy_of_the_first_layer_adds_no_positions(scheme: str) -> None:
    ids, logits = tokens(1, 8), []
    for source in (0, 1):
        model = patched("llama_gqa", scheme)
        layers = model.model.layers
        layers.append(copy.deepcopy(layers[source]))
        layers[-1].load_state_dict(layers[1].state_dict())
        logits.append(model(ids, use_cache=False).logits)
        unpatch_model(model)
        assert not any(layer._forward_pre_hooks for layer in layers)
    assert torch.equal(*logits)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
@torch.no_grad()
def test_positions_that_went_with_the_first_layer_are_missed(scheme: str, tmp_path: Path) -> None:
    model = patched("llama_gqa", scheme)
    model.model.layers.pop(0)
    for action in (lambda: model(tokens(1, 8), use_cache=False), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedError, match="no longer the first layer"):
            action()
