"""A model that was patched in memory is rebuilt from its name with its scheme, or not at all."""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    LlamaModel,
    pipeline,
)

from hf_posenc import UnsupportedError, patch_model, unpatch_model
from hf_posenc.patching.place.scheme_name import SchemeName
from hf_posenc.recipes import begin_blend, set_blend_strength
from tests.checkpoint.checkpoint_cases import llama, randomize
from tests.checkpoint.stock_folder import write_stock_llama

IDS = torch.arange(1, 15).unsqueeze(0)


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stock_llama(tmp_path_factory.mktemp("stock"))


def patched(folder: Path, scheme: str, **options: Any) -> Any:
    """The stock model with a scheme whose parameters, if it has any, are not those of a fresh one."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder), scheme, **options)
    randomize(model.position_encoding)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=0)


SCHEMES = {
    "alibi": {},
    "t5": {},
    "learned": {"num_positions": 32},
    "rope": {"theta": 500.0},
    "none": {"layers": [0]},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("place", ["config._name_or_path", "name_or_path"])
def test_the_name_of_a_patched_model_gives_the_patched_model(stock_folder: Path, scheme: str, place: str) -> None:
    model = patched(stock_folder, scheme, **SCHEMES[scheme])
    name = model.config._name_or_path if place.startswith("config") else model.name_or_path
    assert (logits(model) - logits(AutoModelForCausalLM.from_pretrained(stock_folder))).abs().max() > 1e-3
    for load in (AutoModelForCausalLM, LlamaForCausalLM):
        assert_same(load.from_pretrained(name), model)


def test_the_base_model_of_that_name_is_patched_too(stock_folder: Path) -> None:
    model = patched(stock_folder, "t5")
    for load in (AutoModel, LlamaModel):
        with torch.no_grad():
            found = load.from_pretrained(model.name_or_path)(IDS).last_hidden_state
            torch.testing.assert_close(found, model.model(IDS).last_hidden_state, rtol=0, atol=0)


def test_loading_options_act(stock_folder: Path) -> None:
    name = patched(stock_folder, "t5").config._name_or_path
    model = patched(stock_folder, "t5")
    rebuilt, info = AutoModelForCausalLM.from_pretrained(
        model.config._name_or_path, dtype=torch.bfloat16, device_map={"": "cpu"}, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert {parameter.dtype for parameter in rebuilt.parameters()} == {torch.bfloat16}
    assert_same(rebuilt, copy.deepcopy(model).to(torch.bfloat16))
    assert isinstance(name, SchemeName)


def test_a_message_says_why_and_what_to_do_otherwise(stock_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = patched(stock_folder, "alibi")
    with caplog.at_level(logging.WARNING, logger="hf_posenc"):
        AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
    assert "'alibi'" in caplog.text
    assert "str(name)" in caplog.text


def test_the_plain_string_names_the_stock_model(stock_folder: Path) -> None:
    model = patched(stock_folder, "alibi")
    stock = AutoModelForCausalLM.from_pretrained(str(model.config._name_or_path))
    assert not hasattr(stock, "position_encoding")
    assert_same(stock, AutoModelForCausalLM.from_pretrained(stock_folder))


def test_everything_else_finds_its_files_by_that_name(stock_folder: Path) -> None:
    model = patched(stock_folder, "alibi")
    name = model.config._name_or_path
    assert AutoTokenizer.from_pretrained(name)("word5 word9").input_ids == [5, 9]
    assert AutoConfig.from_pretrained(name).model_type == "llama"
    assert GenerationConfig.from_pretrained(name) is not None
    tokenizer = AutoTokenizer.from_pretrained(stock_folder)
    asked = {"max_new_tokens": 5, "do_sample": False}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)("word5 word9", **asked)
    assert pipeline("text-generation", model=name)("word5 word9", **asked) == expected


def test_it_is_a_string_everywhere(stock_folder: Path) -> None:
    name = patched(stock_folder, "alibi").config._name_or_path
    plain = str(stock_folder)
    assert name == plain
    assert hash(name) == hash(plain)
    assert type(str(name)) is str
    assert json.loads(json.dumps({"name": name})) == {"name": plain}
    for dump in (yaml.dump, yaml.safe_dump):
        assert yaml.safe_load(dump({"name": name})) == {"name": plain}
    torch.save({"name": name}, file := io.BytesIO())
    assert torch.load(io.BytesIO(file.getvalue()), weights_only=True) == {"name": plain}


def test_undoing_the_patch_leaves_the_plain_name(stock_folder: Path) -> None:
    model = unpatch_model(patched(stock_folder, "alibi"))
    assert type(model.config._name_or_path) is str
    assert type(model.name_or_path) is str
    assert not any(isinstance(value, SchemeName) for part in model.modules() for value in vars(part).values())


def test_a_model_without_a_name_stays_without() -> None:
    model = patch_model(llama(), "alibi")
    assert type(model.config._name_or_path) is str
    assert model.config._name_or_path == ""


def test_the_name_follows_the_scheme(stock_folder: Path) -> None:
    model = patched(stock_folder, "alibi")
    old = model.config._name_or_path
    patch_model(model, "t5")
    randomize(model.position_encoding)
    assert_same(AutoModelForCausalLM.from_pretrained(model.config._name_or_path), model)
    assert AutoModelForCausalLM.from_pretrained(old).position_encoding.config.name == "alibi"


def test_trained_parameters_are_those_of_now(stock_folder: Path) -> None:
    model = patched(stock_folder, "t5")
    name = model.config._name_or_path
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.add_(1.0)
    rebuilt = AutoModelForCausalLM.from_pretrained(name)
    pairs = zip(rebuilt.position_encoding.parameters(), model.position_encoding.parameters(), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_blend_is_rebuilt_at_the_strength_it_has(stock_folder: Path) -> None:
    model = patched(stock_folder, "t5")
    begin_blend(model, "alibi")
    set_blend_strength(model, 0.25)
    assert_same(AutoModelForCausalLM.from_pretrained(model.config._name_or_path), model)


class TestCopies:
    def test_a_copy_of_the_model_names_itself(self, stock_folder: Path) -> None:
        model = patched(stock_folder, "t5")
        clone = copy.deepcopy(model)
        randomize(clone.position_encoding)
        assert (logits(clone) - logits(model)).abs().max() > 1e-3
        for name in (clone.config._name_or_path, clone.name_or_path, clone.model.name_or_path):
            assert name.encoding() is clone.position_encoding
        assert_same(AutoModelForCausalLM.from_pretrained(clone.config._name_or_path), clone)
        assert_same(AutoModelForCausalLM.from_pretrained(model.config._name_or_path), model)
        assert type(unpatch_model(clone).config._name_or_path) is str

    def test_a_copy_of_the_config_names_the_model(self, stock_folder: Path) -> None:
        model = patched(stock_folder, "t5")
        assert_same(AutoModelForCausalLM.from_pretrained(copy.deepcopy(model.config)._name_or_path), model)

    def test_a_pickled_config_is_enough_for_a_scheme_without_parameters(self, stock_folder: Path) -> None:
        model = patched(stock_folder, "alibi")
        config = pickle.loads(pickle.dumps(model.config))
        assert_same(AutoModelForCausalLM.from_pretrained(config._name_or_path), model)

    @pytest.mark.parametrize("loss", ["pickled", "collected"])
    def test_parameters_that_are_out_of_reach_are_asked_for(self, stock_folder: Path, loss: str) -> None:
        model = patched(stock_folder, "t5")
        name = model.config._name_or_path
        if loss == "pickled":
            name = pickle.loads(pickle.dumps(name))
        else:
            del model
            gc.collect()
        with pytest.raises(UnsupportedError, match=r"'t5'.*save_pretrained.*str\(name\)"):
            AutoModelForCausalLM.from_pretrained(name)

    def test_a_model_built_from_the_config_has_a_name_of_its_own(self, stock_folder: Path) -> None:
        model = patched(stock_folder, "t5")
        built = AutoModelForCausalLM.from_config(model.config)
        assert built.config._name_or_path.encoding() is built.position_encoding
        assert type(unpatch_model(built).config._name_or_path) is str


class TestPatchedFolders:
    @pytest.fixture
    def folder(self, stock_folder: Path, tmp_path: Path) -> Path:
        patched(stock_folder, "t5").save_pretrained(tmp_path)
        return tmp_path

    def test_a_loaded_model_has_a_plain_name(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model.config._name_or_path) is str
        assert type(model.name_or_path) is str
        assert_same(AutoModelForCausalLM.from_pretrained(model.name_or_path), model)

    def test_one_that_was_unpatched_is_rebuilt_without_the_scheme(self, folder: Path) -> None:
        model = unpatch_model(AutoModelForCausalLM.from_pretrained(folder))
        rebuilt = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
        assert not hasattr(rebuilt, "position_encoding")
        assert_same(rebuilt, model)

    def test_one_with_another_scheme_is_rebuilt_with_that(self, folder: Path) -> None:
        model = patch_model(AutoModelForCausalLM.from_pretrained(folder), "alibi")
        assert_same(AutoModelForCausalLM.from_pretrained(model.config._name_or_path), model)
        assert_same(LlamaForCausalLM.from_pretrained(model.config._name_or_path), model)

    def test_one_with_its_scheme_again_needs_no_living_model(self, folder: Path) -> None:
        model = patch_model(unpatch_model(AutoModelForCausalLM.from_pretrained(folder)), "t5")
        expected = AutoModelForCausalLM.from_pretrained(folder)
        name = model.config._name_or_path
        del model
        gc.collect()
        assert_same(AutoModelForCausalLM.from_pretrained(name), expected)


class TestConfigs:
    def test_the_config_of_the_same_model_may_be_given(self, stock_folder: Path) -> None:
        model = patched(stock_folder, "t5")
        assert_same(LlamaForCausalLM.from_pretrained(model.name_or_path, config=model.config), model)

    def test_a_config_with_another_scheme_is_refused(self, stock_folder: Path) -> None:
        model, other = patched(stock_folder, "t5"), patched(stock_folder, "alibi")
        with pytest.raises(UnsupportedError, match=r"'alibi'.*'t5'"):
            LlamaForCausalLM.from_pretrained(model.name_or_path, config=other.config)
