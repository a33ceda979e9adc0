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
from hf_posenc.patching.place.config_entry import SchemeName
from hf_posenc.recipes import begin_blend, set_blend_strength
from tests.checkpoint.checkpoint_cases import assert_same, base, llama, outputs, randomize


def rebuilt(name: Any, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, **options)


SCHEMES: dict[str, dict[str, Any]] = {
    "alibi": {},
    "t5": {},
    "learned": {"num_positions": 32},
    "rope": {"theta": 500.0},
    "none": {"layers": [0]},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_name_of_a_patched_model_gives_the_patched_model(
    stock: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = patch_model(base(stock), scheme, **SCHEMES[scheme])
    randomize(model.position_encoding)
    assert (outputs(model) - outputs(base(stock))).abs().max() > 1e-3
    for name in (model.config._name_or_path, model.name_or_path):
        with caplog.at_level(logging.WARNING, logger="hf_posenc"):
            assert_same(rebuilt(name), model)
        assert f"'{model.position_encoding.config.name}'" in caplog.text
        assert "str(name)" in caplog.text
        assert_same(LlamaForCausalLM.from_pretrained(name), model)
        for load in (AutoModel, LlamaModel):
            assert_same(load.from_pretrained(name), model.model)
    plain = rebuilt(str(name))
    assert not hasattr(plain, "position_encoding")
    assert_same(plain, base(stock))


def test_loading_options_act(stock: Path) -> None:
    model = base(stock, "t5")
    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}, "output_loading_info": True}
    found, info = rebuilt(model.config._name_or_path, **options)
    assert not info["missing_keys"]
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert_same(found, copy.deepcopy(model).to(torch.bfloat16))


def test_everything_else_finds_its_files_by_that_name_which_is_a_string_everywhere(stock: Path) -> None:
    model = base(stock, "alibi")
    name, plain = model.config._name_or_path, str(stock)
    assert AutoTokenizer.from_pretrained(name)("word5 word9").input_ids == [5, 9]
    assert AutoConfig.from_pretrained(name).model_type == "llama"
    assert GenerationConfig.from_pretrained(name) is not None
    tokenizer = AutoTokenizer.from_pretrained(stock)
    asked = {"max_new_tokens": 5, "do_sample": False}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)("word5 word9", **asked)
    assert pipeline("text-generation", model=name)("word5 word9", **asked) == expected
    assert isinstance(name, SchemeName)
    assert name == plain
    assert hash(name) == hash(plain)
    assert type(str(name)) is str
    assert json.loads(json.dumps({"name": name})) == {"name": plain}
    for dump in (yaml.dump, yaml.safe_dump):
        assert yaml.safe_load(dump({"name": name})) == {"name": plain}
    torch.save({"name": name}, file := io.BytesIO())
    assert torch.load(io.BytesIO(file.getvalue()), weights_only=True) == {"name": plain}


def test_undoing_the_patch_leaves_the_plain_name_and_no_name_stays_none(stock: Path) -> None:
    model = unpatch_model(base(stock, "alibi"))
    assert type(model.config._name_or_path) is type(model.name_or_path) is str
    assert not any(isinstance(value, SchemeName) for part in model.modules() for value in vars(part).values())
    name = patch_model(llama(), "alibi").config._name_or_path
    assert (type(name), name) == (str, "")


def test_the_name_follows_the_scheme_and_its_parameters(stock: Path) -> None:
    model = base(stock, "alibi")
    old = model.config._name_or_path
    patch_model(model, "t5")
    name = model.config._name_or_path
    for _ in range(2):
        randomize(model.position_encoding)
        assert_same(rebuilt(name), model)
    assert rebuilt(old).position_encoding.config.name == "alibi"
    begin_blend(model, "alibi")
    set_blend_strength(model, 0.25)
    assert_same(rebuilt(model.config._name_or_path), model)


class TestCopies:
    def test_a_copy_of_the_model_names_itself(self, stock: Path) -> None:
        model = base(stock, "t5")
        clone = copy.deepcopy(model)
        randomize(clone.position_encoding)
        assert (outputs(clone) - outputs(model)).abs().max() > 1e-3
        for name in (clone.config._name_or_path, clone.name_or_path, clone.model.name_or_path):
            assert name.encoding() is clone.position_encoding
        assert_same(rebuilt(clone.config._name_or_path), clone)
        assert_same(rebuilt(model.config._name_or_path), model)
        assert type(unpatch_model(clone).config._name_or_path) is str

    def test_a_copy_of_the_config_names_the_model(self, stock: Path) -> None:
        model = base(stock, "t5")
        assert_same(rebuilt(copy.deepcopy(model.config)._name_or_path), model)
        model = base(stock, "alibi")
        assert_same(rebuilt(pickle.loads(pickle.dumps(model.config))._name_or_path), model)

    @pytest.mark.parametrize("loss", ["pickled", "collected"])
    def test_parameters_that_are_out_of_reach_are_asked_for(self, stock: Path, loss: str) -> None:
        model = base(stock, "t5")
        name = model.config._name_or_path
        if loss == "pickled":
            name = pickle.loads(pickle.dumps(name))
        else:
            del model
            gc.collect()
        with pytest.raises(UnsupportedError, match=r"'t5'.*save_pretrained.*str\(name\)"):
            rebuilt(name)

    def test_a_model_built_from_the_config_has_a_name_of_its_own(self, stock: Path) -> None:
        built = AutoModelForCausalLM.from_config(base(stock, "t5").config)
        assert built.config._name_or_path.encoding() is built.position_encoding
        assert type(unpatch_model(built).config._name_or_path) is str


class TestPatchedFolders:
    @pytest.fixture
    def folder(self, stock: Path, tmp_path: Path) -> Path:
        base(stock, "t5").save_pretrained(tmp_path)
        return tmp_path

    def test_a_loaded_model_has_a_plain_name(self, folder: Path) -> None:
        model = rebuilt(folder)
        assert type(model.config._name_or_path) is type(model.name_or_path) is str
        assert_same(rebuilt(model.name_or_path), model)

    def test_one_that_was_changed_is_rebuilt_as_it_is(self, folder: Path) -> None:
        model = unpatch_model(rebuilt(folder))
        found = rebuilt(model.config._name_or_path)
        assert not hasattr(found, "position_encoding")
        assert_same(found, model)
        patch_model(model, "alibi")
        assert_same(rebuilt(model.config._name_or_path), model)
        assert_same(LlamaForCausalLM.from_pretrained(model.config._name_or_path), model)

    def test_one_with_its_scheme_again_needs_no_living_model(self, folder: Path) -> None:
        model = patch_model(unpatch_model(rebuilt(folder)), "t5")
        name = model.config._name_or_path
        del model
        gc.collect()
        assert_same(rebuilt(name), rebuilt(folder))


def test_only_the_config_of_the_same_model_may_be_given(stock: Path) -> None:
    model, other = base(stock, "t5"), base(stock, "alibi")
    assert_same(LlamaForCausalLM.from_pretrained(model.name_or_path, config=model.config), model)
    with pytest.raises(UnsupportedError, match=r"'alibi'.*'t5'"):
        LlamaForCausalLM.from_pretrained(model.name_or_path, config=other.config)
