"""Weights are loaded into the scheme they were trained with, or not at all."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import hf_posenc
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.entry import find_mark
from tests.checkpoint.checkpoint_cases import llama, outputs, randomize
from tests.fresh import run_fresh

STOCK: tuple[str | None, dict[str, Any]] = (None, {})
ALIBI: tuple[str, dict[str, Any]] = ("alibi", {})
ROPE: tuple[str, dict[str, Any]] = ("rope", {"theta": 500.0})
T5: tuple[str, dict[str, Any]] = ("t5", {})
T5_NEAR: tuple[str, dict[str, Any]] = ("t5", {"max_distance": 64})
PAIRS = [
    pytest.param(STOCK, ALIBI, r"alibi.*stock positions", id="stock-from-patched"),
    pytest.param(ALIBI, STOCK, "do not name a position encoding", id="patched-from-stock"),
    pytest.param(ALIBI, ROPE, r"rope\(theta=500\.0\).*alibi", id="another-scheme"),
    pytest.param(("rope", {"theta": 600.0}), ROPE, r"theta=500\.0.*theta=600\.0", id="other-theta"),
    pytest.param(T5_NEAR, T5, r"t5.*t5\(max_distance=64\)", id="other-distance"),
]


def made(kind: tuple[str | None, dict[str, Any]], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    scheme, options = kind
    model = llama()
    return randomize(model if scheme is None else hf_posenc.patch_model(model, scheme, **options))


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_a_state_dict_of_another_scheme_is_refused_before_anything_is_copied(
    into: Any, source: Any, message: str
) -> None:
    model, weights = made(into), made(source, seed=1).state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SchemeMismatchError, match=message) as caught:
        model.load_state_dict(weights)
    assert isinstance(caught.value, RuntimeError)
    assert "strict=False" in str(caught.value)
    for scheme, _ in (into, source):
        assert (scheme or "stock") in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(weights, strict=False)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_it_is_refused_through_whatever_stands_around_the_model(into: Any, source: Any, message: str) -> None:
    for wrap in (torch.nn.Sequential, torch.compile, lambda model: torch.optim.swa_utils.AveragedModel(model)):
        wrapped, weights = wrap(made(into)), wrap(made(source)).state_dict()
        with pytest.raises(RuntimeError, match=r"position_encoding\._extra_state|position encoding"):
            wrapped.load_state_dict(weights)
        wrapped.load_state_dict(wrapped.state_dict())


@pytest.mark.parametrize("kind", [ALIBI, T5])
def test_the_mark_is_that_of_the_scheme_in_force(kind: Any, tmp_path: Path) -> None:
    model = made(kind)
    twins = {
        "deep copy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "bfloat16": copy.deepcopy(model).to(torch.bfloat16),
        "half": copy.deepcopy(model).half(),
        "double": copy.deepcopy(model).double(),
        "meta": copy.deepcopy(model).to("meta"),
    }
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7), use_buffers=True
    )
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    twins["average"] = averaged.module
    key = find_mark(model.state_dict())
    assert key is not None
    for name, twin in twins.items():
        assert torch.equal(twin.state_dict()[key], model.state_dict()[key]), name
    assert not [name for name, _ in model.named_buffers() if "position_encoding" in name]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert not model.load_state_dict(torch.load(file, weights_only=True)).missing_keys


@pytest.mark.parametrize("name", ["model.safetensors", "weights", "weights.bin"])
def test_tools_that_load_a_whole_state_dict_meet_it(name: str, tmp_path: Path) -> None:
    model, other = made(ALIBI), made(ALIBI, seed=1)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        called = torch.func.functional_call(other, model.state_dict(), (ids,)).logits
        assert torch.equal(called, model(ids).logits)
    assert not any("_extra_state" in vars(module) for module in other.modules())
    safetensors.torch.save_model(model, str(tmp_path / name))
    safetensors.torch.load_model(other, str(tmp_path / name))
    assert torch.equal(outputs(other), outputs(model))
    with pytest.raises(RuntimeError, match=r"alibi.*rope"):
        safetensors.torch.load_model(made(ROPE), str(tmp_path / name))


def test_unpatching_leaves_the_keys_of_the_stock_model() -> None:
    stock = made(STOCK)
    expected = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    model = hf_posenc.unpatch_model(hf_posenc.patch_model(stock, "alibi"))
    assert list(model.state_dict()) == list(expected)
    model.load_state_dict(expected)
    made(STOCK, seed=1).load_state_dict(model.state_dict())


# Folders


def saved(kind: Any, folder: Path, form: str = "whole") -> Path:
    model = made(kind, seed=len(str(kind)))
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if form == "sharded" else {}))
    if form == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def move_weights(source: Path, target: Path) -> None:
    for folder, move in ((target, lambda path: path.unlink()), (source, lambda path: shutil.copy(path, target))):
        for path in folder.iterdir():
            if path.name != "config.json" and path.name != "generation_config.json":
                move(path)


@pytest.mark.parametrize("form", ["whole", "sharded", "bin"])
@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_weights_copied_into_the_folder_of_another_model_are_refused(
    tmp_path: Path, into: Any, source: Any, message: str, form: str
) -> None:
    target = saved(into, tmp_path / "target", form)
    move_weights(saved(source, tmp_path / "source", form), target)
    for options in ({}, {"output_loading_info": True}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}):
        with pytest.raises(SchemeMismatchError, match=r"hf_posenc|position encoding"):
            AutoModelForCausalLM.from_pretrained(target, **options)
    with pytest.raises(SchemeMismatchError):
        LlamaForSequenceClassification.from_pretrained(target)


def test_position_weights_without_a_mark_are_no_stock_weights(tmp_path: Path) -> None:
    stock = saved(STOCK, tmp_path / "stock")
    weights = {name: weight for name, weight in made(T5).state_dict().items() if find_mark([name]) is None}
    save_file(weights, stock / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SchemeMismatchError, match=r"position_encoding\.stacks.*Restore the config\.json"):
        LlamaForCausalLM.from_pretrained(stock)


def test_both_schemes_and_the_remedy_are_named(tmp_path: Path) -> None:
    target = saved(T5_NEAR, tmp_path / "near")
    move_weights(saved(T5, tmp_path / "far"), target)
    message = r"encoding t5, but the config that from_pretrained has read names .* t5\(max_distance=64\)\. Restore"
    with pytest.raises(SchemeMismatchError, match=message):
        LlamaForCausalLM.from_pretrained(target)
    stock = saved(STOCK, tmp_path / "stock")
    move_weights(saved(ALIBI, tmp_path / "alibi"), stock)
    with pytest.raises(SchemeMismatchError, match=r"Restore the config\.json"):
        LlamaForCausalLM.from_pretrained(stock)


def test_a_stock_model_tells_its_loading_info_as_before(tmp_path: Path) -> None:
    saved(STOCK, tmp_path)
    assert isinstance(LlamaForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM)
    model, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM)
    assert not info["unexpected_keys"]


def older(folder: Path) -> Path:
    """What version 1 of the format looked like: weights without a mark."""
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        save_file({key: weights[key] for key in weights if find_mark([key]) is None}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["position_encoding"]["format"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", [ALIBI, T5])
def test_a_folder_of_an_older_version_loads_with_a_warning_and_is_tied_when_saved_again(
    tmp_path: Path, kind: Any
) -> None:
    folder = saved(kind, tmp_path / "model")
    expected = outputs(AutoModelForCausalLM.from_pretrained(folder))
    older(folder)
    for options in ({}, {"low_cpu_mem_usage": True}, {"device_map": "cpu"}):
        with pytest.warns(UserWarning, match="older hf_posenc"):
            loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert torch.equal(outputs(loaded), expected)
        assert loaded.load_state_dict(loaded.state_dict())
    loaded.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(folder)), expected)


def test_a_state_dict_given_to_save_pretrained_gets_the_mark(tmp_path: Path) -> None:
    """FSDP and ZeRO gather one without it."""
    model = made(ALIBI)
    gathered = {name: tensor for name, tensor in model.state_dict().items() if find_mark([name]) is None}
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert find_mark(gathered) is None
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


def test_weights_that_stay_on_disk_load(tmp_path: Path) -> None:
    folder = saved(ALIBI, tmp_path / "model")
    expected = outputs(AutoModelForCausalLM.from_pretrained(folder))
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.position_encoding": "cpu", "lm_head": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offload")
    assert torch.equal(outputs(loaded), expected)


# base_model_type


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model_type", ["gpt2", "../../x", "roformer", "position_encoding", "Llama"])
def test_base_model_type_is_that_of_the_class(tmp_path: Path, model_type: str) -> None:
    folder = saved(ALIBI, tmp_path)
    edited(folder, lambda config: config["position_encoding"].update(base_model_type=model_type))
    for reader in (AutoModelForCausalLM, LlamaForCausalLM, LlamaConfig, AutoConfig):
        with pytest.raises(CheckpointError, match="base_model_type") as caught:
            reader.from_pretrained(folder)
        assert model_type in str(caught.value)
    edited(folder, lambda config: config.update(architectures=["hf_posenc.SomethingElse"]))
    with pytest.raises(CheckpointError, match="base_model_type"):
        LlamaForCausalLM.from_pretrained(folder)


def test_a_class_of_ones_own_loads_registered_or_not(tmp_path: Path) -> None:
    class OwnConfig(LlamaConfig):
        model_type = "own_llama_for_identity_test"

    class OwnForCausalLM(LlamaForCausalLM):
        config_class = OwnConfig

    small = llama().config.to_diff_dict()
    small.pop("model_type")
    model = randomize(hf_posenc.patch_model(OwnForCausalLM(OwnConfig(**small)), "alibi"))
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(OwnForCausalLM.from_pretrained(tmp_path)), outputs(model))
    with pytest.raises(CheckpointError, match=r"AutoConfig\.register"):
        AutoConfig.from_pretrained(tmp_path)
    AutoConfig.register("own_llama_for_identity_test", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


# The dictionary of a config, and keys of others


STOCK_PROCESS = """
import sys, transformers
for reader in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.LlamaModel):
    for folder in sys.argv[1:]:
        try:
            reader.from_pretrained(folder)
        except Exception as error:
            assert "nstall" in str(error) and "hf_posenc" in str(error), error
        else:
            sys.exit(f"{reader.__name__} loaded {folder}")
"""


def test_a_config_dictionary_written_by_hand_is_ours_with_the_package_and_unreadable_without(tmp_path: Path) -> None:
    model = made(ALIBI)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    model.save_pretrained(whole)
    model.save_pretrained(shards, max_shard_size="20KB")
    for folder in (whole, shards):
        (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(outputs(loaded), outputs(model))
        assert not hasattr(loaded.config, "transformers_weights")
    done = run_fresh(STOCK_PROCESS, whole, shards, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_damaged_dictionary_written_by_hand_is_explained(tmp_path: Path) -> None:
    folder, model = tmp_path, made(ALIBI)
    model.save_pretrained(folder)
    for change, message in (({"scheme": {"scheme": "albi"}}, "Did you mean 'alibi'"), ({"format": 99}, "Update")):
        config = model.config.to_dict()
        config["position_encoding"] = config["position_encoding"] | change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("foreign", ["1d", {"kind": "alibi"}, {"format": "x", "scheme": {"scheme": "unknown"}}])
def test_a_key_of_the_same_name_in_a_stock_config_is_not_ours(tmp_path: Path, foreign: Any) -> None:
    stock = made(STOCK)
    stock.config.position_encoding = foreign
    stock.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM(stock.config)):
        assert not hasattr(loaded, "position_encoding")
        assert loaded.config.position_encoding == foreign
    with pytest.raises(ValueError, match="already has an attribute"):
        hf_posenc.patch_model(stock, "alibi")
    assert not hasattr(stock, "position_encoding")
