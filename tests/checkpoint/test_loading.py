"""The routes into `from_pretrained`, and what a checkpoint that does not fit gets."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)

import hf_posenc
from hf_posenc.checkpoint import loading
from hf_posenc.checkpoint.install import install
from hf_posenc.entry import read_entry
from hf_posenc.errors import PositionEncodingError, UnsupportedError
from tests.checkpoint.checkpoint_cases import LENGTH, bert, gpt2, llama, outputs, randomize, token_ids
from tests.models import tiny_config


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return randomize(hf_posenc.patch_model(llama(), "t5"))


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_base_class_gives_the_hidden_states_of_the_saved_model(model: Any, folder: Path) -> None:
    for base_class in (AutoModel, LlamaModel):
        base, info = base_class.from_pretrained(folder, output_loading_info=True)
        assert type(base) is LlamaModel
        assert not info["missing_keys"]
        assert torch.equal(outputs(base), outputs(model.model))


def test_base_model_saved_alone_loads_into_a_head_model(model: Any, tmp_path: Path) -> None:
    model.model.save_pretrained(tmp_path)
    head, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(outputs(head.model), outputs(model.model))


def test_other_head_keeps_the_scheme_and_takes_config_overrides(model: Any, folder: Path) -> None:
    for head_class in (AutoModelForSequenceClassification, LlamaForSequenceClassification):
        classifier = head_class.from_pretrained(folder, num_labels=3, attn_implementation="eager")
        assert type(classifier) is LlamaForSequenceClassification
        assert classifier.config.num_labels == 3
        assert classifier.config._attn_implementation == "eager"
        assert torch.allclose(outputs(classifier.model), outputs(model.model), atol=1e-5)


def test_loading_info_is_returned_only_on_request(folder: Path) -> None:
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), LlamaForCausalLM)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(loaded, LlamaForCausalLM)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_config_loaded_by_hand_can_be_passed(model: Any, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    before = config.to_json_string()
    loaded = LlamaForCausalLM.from_pretrained(folder, config=config)
    assert torch.equal(outputs(loaded), outputs(model))
    assert config.to_json_string() == before


def test_state_dict_without_a_folder_can_be_passed(model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(outputs(loaded), outputs(model))


def test_from_config_builds_a_patched_model(model: Any) -> None:
    for build in (AutoModelForCausalLM.from_config, LlamaForCausalLM._from_config):
        built = build(model.config, dtype=torch.bfloat16)
        assert type(built) is LlamaForCausalLM
        assert built.state_dict().keys() == model.state_dict().keys()
        assert built.position_encoding.config == model.position_encoding.config
        assert built.dtype == torch.bfloat16
    assert read_entry(model.config) is not None


def test_calling_the_class_with_a_patched_config_is_refused(model: Any) -> None:
    for model_class in (LlamaForCausalLM, LlamaModel):
        with pytest.raises(UnsupportedError, match=r"from_config\(config\)"):
            model_class(model.config)
    with pytest.raises(UnsupportedError, match="from_config"):
        LlamaForCausalLM(LlamaConfig(**model.config.to_dict()))


def test_stock_config_for_a_patched_checkpoint_is_refused(folder: Path) -> None:
    for model_class in (LlamaForCausalLM, AutoModelForCausalLM):
        with pytest.raises(UnsupportedError, match="does not contain it"):
            model_class.from_pretrained(folder, config=LlamaConfig())


def test_unpatching_a_reloaded_model_gives_the_stock_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for build, scheme in ((llama, "t5"), (gpt2, "rope"), (bert, "alibi")):
        stock = randomize(build())
        expected, keys, text = outputs(stock), list(stock.state_dict()), stock.config.to_diff_dict()
        hf_posenc.patch_model(stock, scheme).save_pretrained(tmp_path / scheme)
        loaded = type(stock).from_pretrained(tmp_path / scheme)
        assert not torch.equal(outputs(loaded), expected)
        hf_posenc.unpatch_model(loaded)
        assert torch.equal(outputs(loaded), expected)
        assert list(loaded.state_dict()) == keys
        assert type(loaded.config) is type(loaded).config_class
        ignored = {"architectures", "dtype", "_name_or_path"}
        assert {k: v for k, v in loaded.config.to_diff_dict().items() if k not in ignored} == {
            k: v for k, v in text.items() if k not in ignored
        }
        loaded.save_pretrained(tmp_path / f"{scheme}-stock")
        assert json.loads((tmp_path / f"{scheme}-stock" / "config.json").read_text())["model_type"] == (
            loaded.config.model_type
        )


def test_native_weights_are_frozen_again_until_the_patch_is_undone(tmp_path: Path) -> None:
    hf_posenc.patch_model(bert(), "alibi").save_pretrained(tmp_path)
    for options in ({}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}):
        loaded = BertForMaskedLM.from_pretrained(tmp_path, **options)
        frozen = [name for name, parameter in loaded.named_parameters() if not parameter.requires_grad]
        assert frozen == ["bert.embeddings.position_embeddings.weight"]
        hf_posenc.unpatch_model(loaded)
        assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_generation_without_a_cache_stays_and_ends_with_the_patch(tmp_path: Path) -> None:
    scheme = hf_posenc.RopeConfig(scaling=hf_posenc.DynamicScaling(2.0, 64))
    with pytest.warns(UserWarning, match="use_cache=False"):
        hf_posenc.patch_model(llama(), scheme).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="use_cache=False"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.use_cache is False
    hf_posenc.unpatch_model(loaded)
    assert loaded.generation_config.use_cache is True


def test_patching_a_reloaded_model_again_replaces_the_scheme(folder: Path, tmp_path: Path) -> None:
    loaded = hf_posenc.patch_model(LlamaForCausalLM.from_pretrained(folder), "alibi")
    expected = outputs(loaded)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.position_encoding.config == hf_posenc.get_scheme("alibi")()
    assert torch.equal(outputs(again), expected)


def test_reloaded_model_decodes_as_it_runs(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    generated = loaded.generate(token_ids()[:1, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert generated.shape[1] == 11
    for end in range(5, 11):
        full = outputs(loaded, generated[:, :end])
        assert full[0, -1].argmax() == generated[0, end]


def _edit_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _position_keys(weights: dict[str, torch.Tensor]) -> list[str]:
    keys = [key for key in weights if "position_encoding.stacks" in key]
    assert keys
    return keys


def test_missing_position_weights_are_an_error(folder: Path) -> None:
    _edit_weights(folder, lambda weights: [weights.pop(key) for key in _position_keys(weights)])
    for model_class in (AutoModelForCausalLM, LlamaForCausalLM, AutoModel):
        with pytest.raises(PositionEncodingError, match="random weights"):
            model_class.from_pretrained(folder)


def test_position_weights_of_another_shape_are_an_error(folder: Path) -> None:
    def shrink(weights: dict[str, torch.Tensor]) -> None:
        for key in _position_keys(weights):
            weights[key] = weights[key][:3].clone()

    _edit_weights(folder, shrink)
    with pytest.raises(
        PositionEncodingError, match=r"of the shape \[32, 4\], but in model.safetensors it has the shape \[3, 4\]"
    ):
        AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_weights_of_another_scheme_are_an_error(folder: Path) -> None:
    path = folder / "config.json"
    disk = json.loads(path.read_text())
    disk["position_encoding"]["scheme"] = hf_posenc.get_scheme("alibi")().to_dict()
    path.write_text(json.dumps(disk))
    with pytest.raises(PositionEncodingError, match="the config that from_pretrained has read names"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_scheme_that_does_not_fit_the_model_is_an_error(folder: Path) -> None:
    path = folder / "config.json"
    disk = json.loads(path.read_text())
    disk["position_encoding"]["scheme"] = {"scheme": "rope", "rotary_dim": 4096}
    path.write_text(json.dumps(disk))
    with pytest.raises(ValueError, match="4096"):
        AutoModelForCausalLM.from_pretrained(folder)


def _as_hub_cache(folder: Path, cache: Path, revision: str) -> None:
    repository = cache / "models--someone--some-model"
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)


def test_hub_ids_load_with_revision_and_subfolder(
    model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    revision = "0123456789abcdef0123456789abcdef01234567"
    model.save_pretrained(folder / "below")
    _as_hub_cache(folder, tmp_path / "cache", revision)
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    for model_class in (AutoModelForCausalLM, LlamaForCausalLM):
        for options in ({}, {"revision": "main"}, {"revision": revision}, {"subfolder": "below"}):
            loaded = model_class.from_pretrained("someone/some-model", **hub, **options)
            assert torch.equal(outputs(loaded), outputs(model))
    with pytest.raises(UnsupportedError, match="does not contain it"):
        LlamaForCausalLM.from_pretrained("someone/some-model", config=LlamaConfig(), **hub)


def test_what_the_cache_does_not_tell_is_found_while_loading(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_patched", lambda source, kwargs: False)
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(outputs(loaded), outputs(model))


def test_stock_checkpoints_take_the_stock_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> None:
        raise AssertionError("a stock checkpoint reached the patching path")

    torch.manual_seed(0)
    stock = randomize(llama())
    stock.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "patching_proxy", forbidden)
    monkeypatch.setattr("hf_posenc.checkpoint.agreement.check_loaded", forbidden)
    monkeypatch.setattr("hf_posenc.patching.place.config_entry.attach_entry", forbidden)
    for model_class in (AutoModelForCausalLM, LlamaForCausalLM):
        for options in ({}, {"config": LlamaConfig.from_pretrained(tmp_path)}, {"device_map": "cpu"}):
            loaded = model_class.from_pretrained(tmp_path, **options)
            assert type(loaded) is LlamaForCausalLM
            assert type(loaded.config) is LlamaConfig
            assert torch.equal(outputs(loaded), outputs(stock))
    assert type(AutoModelForCausalLM.from_config(stock.config).config) is LlamaConfig


def test_broken_stock_checkpoints_get_the_stock_errors(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(OSError, match="no file named"):
        LlamaForCausalLM.from_pretrained(tmp_path, config=LlamaConfig(), subfolder="nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "hf_posenc"')
    with pytest.raises(OSError, match="not a valid JSON file"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_installing_twice_changes_nothing() -> None:
    before = {name: PreTrainedModel.__dict__[name] for name in ("from_pretrained", "_from_config", "__init__")}
    install()
    assert {name: PreTrainedModel.__dict__[name] for name in before} == before


def test_deep_copy_is_independent(model: Any) -> None:
    expected = outputs(model)
    twin = copy.deepcopy(model)
    assert torch.equal(outputs(twin), expected)
    hf_posenc.unpatch_model(twin)
    assert read_entry(twin.config) is None
    assert not torch.equal(outputs(twin), expected)
    assert torch.equal(outputs(model), expected)
    assert read_entry(model.config) is not None


@pytest.mark.parametrize("scheme", ["t5", "alibi", "rope", "learned"])
def test_whole_model_survives_torch_save(tmp_path: Path, scheme: str) -> None:
    torch.manual_seed(0)
    for build in (llama, bert):
        model = randomize(hf_posenc.patch_model(build(), scheme))
        expected = outputs(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(outputs(loaded), expected)
        assert loaded.config == model.config
        hf_posenc.unpatch_model(loaded)
        hf_posenc.unpatch_model(model)
        assert torch.equal(outputs(loaded), outputs(model))


def test_sequence_beyond_the_table_is_refused_after_reload(tmp_path: Path) -> None:
    model = hf_posenc.patch_model(bert(), "learned", num_positions=LENGTH)
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(loaded), outputs(model.eval()))
    with pytest.raises(IndexError, match=str(LENGTH)):
        outputs(loaded, token_ids(LENGTH + 1))


def test_a_stock_model_with_the_config_of_a_patched_one_is_not_saved(tmp_path: Path) -> None:
    config = tiny_config("LlamaForCausalLM")
    patched, stock = LlamaForCausalLM(config), LlamaForCausalLM(config)
    hf_posenc.patch_model(patched, "alibi")
    stock.config = patched.config
    with pytest.raises(UnsupportedError, match="config of a patched model"):
        stock.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    patched.save_pretrained(tmp_path / "patched")
    hf_posenc.unpatch_model(patched)
    stock.save_pretrained(tmp_path / "stock")
