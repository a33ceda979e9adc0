"""Weights are loaded into the scheme they were trained with, or not at all."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import hf_posenc
from hf_posenc import CheckpointError, UnsupportedError
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.entry import find_mark
from tests.checkpoint.checkpoint_cases import (
    FORMS,
    assert_same,
    edit_weights,
    llama,
    made,
    outputs,
    randomize,
    refused,
    without_mark,
    written,
)
from tests.models import tiny

STOCK: dict[str, Any] = {"scheme": None}
ALIBI: dict[str, Any] = {"scheme": "alibi"}
ROPE: dict[str, Any] = {"scheme": "rope", "theta": 500.0}
T5: dict[str, Any] = {"scheme": "t5"}
T5_NEAR: dict[str, Any] = {"scheme": "t5", "max_distance": 64}
#: The scheme of a model, that of weights for it, and what the error says.
PAIRS = [
    pytest.param(STOCK, ALIBI, r"alibi.*stock positions", id="stock-from-patched"),
    pytest.param(ALIBI, STOCK, "do not name a position encoding", id="patched-from-stock"),
    pytest.param(ALIBI, ROPE, r"rope\(theta=500\.0\).*alibi", id="another-scheme"),
    pytest.param({"scheme": "rope", "theta": 600.0}, ROPE, r"theta=500\.0.*theta=600\.0", id="other-theta"),
    pytest.param(T5_NEAR, T5, r"t5.*t5\(max_distance=64\)", id="other-distance"),
]
#: Every pair in one form, and every form with a pair of each direction.
CROSSINGS = [pytest.param("whole", *pair.values, id=f"whole-{pair.id}") for pair in PAIRS] + [
    pytest.param(form, *pair.values, id=f"{form}-{pair.id}") for form in FORMS[1:] for pair in PAIRS[:2]
]


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_a_state_dict_of_another_scheme_is_refused_before_anything_is_copied(
    into: Any, source: Any, message: str
) -> None:
    model, weights = made(**into), made(**source, seed=1).state_dict()
    names = list(model.state_dict())
    with refused(message, model, error=SchemeMismatchError) as caught:
        model.load_state_dict(weights)
    assert isinstance(caught.value, RuntimeError)
    assert "strict=False" in str(caught.value)
    assert all((kind["scheme"] or "stock") in str(caught.value) for kind in (into, source))
    for wrap in (torch.nn.Sequential, torch.compile, AveragedModel):
        wrapped, state = wrap(made(**into)), wrap(made(**source)).state_dict()
        with pytest.raises(RuntimeError, match=r"position_encoding\._extra_state|position encoding"):
            wrapped.load_state_dict(state)
        wrapped.load_state_dict(wrapped.state_dict())
    model.load_state_dict(weights, strict=False)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("kind", [ALIBI, T5])
def test_the_mark_is_that_of_the_scheme_in_force(kind: Any) -> None:
    model = made(**kind)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    for _ in range(2):
        averaged.update_parameters(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), averaged.module]
    twins += [copy.deepcopy(model).to(kind) for kind in (torch.bfloat16, torch.half, torch.double, "meta")]
    key = find_mark(model.state_dict())
    assert key is not None
    assert all(torch.equal(twin.state_dict()[key], model.state_dict()[key]) for twin in twins)
    assert not [name for name, _ in model.named_buffers() if "position_encoding" in name]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert not model.load_state_dict(torch.load(file, weights_only=True)).missing_keys


@pytest.mark.parametrize("name", ["model.safetensors", "weights", "weights.bin"])
def test_tools_that_load_a_whole_state_dict_meet_the_mark(name: str, tmp_path: Path) -> None:
    model, other = made(**ALIBI), made(**ALIBI, seed=1)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(other, model.state_dict(), (ids,)).logits, model(ids).logits)
    assert not any("_extra_state" in vars(module) for module in other.modules())
    safetensors.torch.save_model(model, str(tmp_path / name))
    safetensors.torch.load_model(other, str(tmp_path / name))
    assert_same(other, model)
    with pytest.raises(RuntimeError, match=r"alibi.*rope"):
        safetensors.torch.load_model(made(**ROPE), str(tmp_path / name))


# Folders


def move_weights(source: Path, target: Path) -> Path:
    for path in target.iterdir():
        if path.name not in ("config.json", "generation_config.json"):
            path.unlink()
    for path in source.iterdir():
        if path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, target)
    return target


@pytest.mark.parametrize(("form", "into", "source", "message"), CROSSINGS)
def test_weights_copied_into_the_folder_of_another_model_are_refused_as_a_mismatch(
    tmp_path: Path, form: str, into: Any, source: Any, message: str
) -> None:
    target = written(made(**into), tmp_path / "target", form)
    move_weights(written(made(**source, seed=1), tmp_path / "source", form), target)
    for options in ({}, {"output_loading_info": True}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}):
        with pytest.raises(SchemeMismatchError, match=r"hf_posenc|position encoding"):
            AutoModelForCausalLM.from_pretrained(target, **options)
    with pytest.raises(SchemeMismatchError):
        LlamaForSequenceClassification.from_pretrained(target)


def test_both_schemes_and_the_remedy_are_named(tmp_path: Path) -> None:
    target = written(made(**T5_NEAR), tmp_path / "near")
    move_weights(written(made(**T5), tmp_path / "far"), target)
    message = r"encoding t5, but the config that from_pretrained has read names .* t5\(max_distance=64\)\. Restore"
    with pytest.raises(SchemeMismatchError, match=message):
        LlamaForCausalLM.from_pretrained(target)
    stock = written(made(), tmp_path / "stock")
    move_weights(tmp_path / "far", stock)
    with pytest.raises(SchemeMismatchError, match=r"Restore the config\.json"):
        LlamaForCausalLM.from_pretrained(stock)
    # Position weights without a mark are no stock weights either.
    edit_weights(stock / "model.safetensors", lambda name, tensor: tensor if find_mark([name]) is None else None)
    with pytest.raises(SchemeMismatchError, match=r"position_encoding\.stacks.*Restore the config\.json"):
        LlamaForCausalLM.from_pretrained(stock)


@pytest.mark.parametrize("kind", [ALIBI, T5])
def test_a_folder_of_an_older_version_loads_with_a_warning_and_names_its_scheme_when_saved_again(
    tmp_path: Path, kind: Any
) -> None:
    folder = written(made(**kind), tmp_path)
    expected = outputs(AutoModelForCausalLM.from_pretrained(folder))
    without_mark(folder)
    for options in ({}, {"low_cpu_mem_usage": True}, {"device_map": "cpu"}):
        with pytest.warns(UserWarning, match="older hf_posenc"):
            loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert_same(loaded, expected)
        assert loaded.load_state_dict(loaded.state_dict())
    loaded.save_pretrained(folder)
    with warnings.catch_warnings(action="error"):
        assert_same(AutoModelForCausalLM.from_pretrained(folder), expected)


def test_a_state_dict_given_to_save_pretrained_gets_the_mark(tmp_path: Path) -> None:
    """FSDP and ZeRO gather one without it."""
    model = made(**ALIBI)
    gathered = {name: tensor for name, tensor in model.state_dict().items() if find_mark([name]) is None}
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert find_mark(gathered) is None
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


# The fields of a config


def test_a_class_of_ones_own_loads_registered_or_not(tmp_path: Path) -> None:
    class OwnConfig(LlamaConfig):
        model_type = "own_llama_for_identity_test"

    class OwnForCausalLM(LlamaForCausalLM):
        config_class = OwnConfig

    small = llama().config.to_diff_dict()
    small.pop("model_type")
    model = randomize(hf_posenc.patch_model(OwnForCausalLM(OwnConfig(**small)), "alibi"))
    model.save_pretrained(tmp_path)
    assert_same(OwnForCausalLM.from_pretrained(tmp_path), model)
    with pytest.raises(CheckpointError, match=r"AutoConfig\.register"):
        AutoConfig.from_pretrained(tmp_path)
    AutoConfig.register("own_llama_for_identity_test", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("foreign", ["1d", {"kind": "alibi"}, {"format": "x", "scheme": {"scheme": "unknown"}}])
def test_a_key_of_the_same_name_in_a_stock_config_is_not_ours(tmp_path: Path, foreign: Any) -> None:
    stock = made()
    stock.config.position_encoding = foreign
    stock.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM(stock.config)):
        assert not hasattr(loaded, "position_encoding")
        assert loaded.config.position_encoding == foreign
    with pytest.raises(ValueError, match="already has an attribute"):
        hf_posenc.patch_model(stock, "alibi")
    assert not hasattr(stock, "position_encoding")


def test_a_scheme_for_an_encoder_decoder_is_for_one_of_its_models(tmp_path: Path) -> None:
    tiny("BertModel").save_pretrained(tmp_path)
    build, folder = EncoderDecoderModel.from_encoder_decoder_pretrained, str(tmp_path)
    with pytest.raises(UnsupportedError, match="takes encoder_position_encoding= and decoder_position_encoding="):
        build(folder, folder, position_encoding="alibi")
    model = build(folder, folder, decoder_position_encoding="alibi")
    assert not hasattr(model.encoder, "position_encoding")
    assert model.decoder.position_encoding.config.name == "alibi"
