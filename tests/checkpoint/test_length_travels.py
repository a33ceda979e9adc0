"""A length that was set by `extend_context` goes with the scheme: by name, in adapters, past other schemes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from hf_posenc import (
    CheckpointError,
    extend_context,
    load_position_adapter,
    patch_model,
    save_position_adapter,
    unpatch_model,
)
from tests.checkpoint.stock_folder import write_stock_llama
from tests.checkpoint.test_adapters import LORA, adapted, base

LONG = 1024


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stock_llama(tmp_path_factory.mktemp("stock"))


def stated(model: Any) -> set[int]:
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return {inner.config.max_position_embeddings, inner.position_encoding.lengths.current}


def extended(stock: Path, scheme: str = "t5") -> Any:
    return extend_context(base(stock, scheme), length=LONG)


class TestNames:
    def test_a_rebuilt_model_has_the_length(self, stock: Path) -> None:
        model = extended(stock)
        again = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
        assert stated(again) == {LONG}
        third = AutoModelForCausalLM.from_pretrained(again.name_or_path)
        assert stated(third) == {LONG}
        assert AutoModelForCausalLM.from_pretrained(str(again.name_or_path)).config.max_position_embeddings < LONG

    def test_also_from_a_pickled_name(self, stock: Path) -> None:
        name = pickle.loads(pickle.dumps(extended(stock, "alibi").config._name_or_path))
        assert stated(AutoModelForCausalLM.from_pretrained(name)) == {LONG}

    def test_a_model_that_nobody_extended_has_the_length_of_its_scheme(self, stock: Path) -> None:
        model = base(stock, "alibi")
        assert stated(AutoModelForCausalLM.from_pretrained(model.name_or_path)) == stated(model) != {LONG}

    def test_one_that_was_loaded_from_a_patched_folder(self, stock: Path, tmp_path: Path) -> None:
        """The folder holds the scheme and its parameters, and states the length from before."""
        base(stock, "t5").save_pretrained(tmp_path)
        model = extend_context(AutoModelForCausalLM.from_pretrained(tmp_path), length=LONG)
        weight = next(model.position_encoding.parameters())
        expected = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
        again = AutoModelForCausalLM.from_pretrained(model.name_or_path)
        assert stated(again) == {LONG}
        assert torch.equal(next(again.position_encoding.parameters()), expected), "parameters go with the other weights"
        assert type(unpatch_model(model).config._name_or_path) is not str, "the files are those of a patched model"

    def test_trl_compares_with_a_reference_of_this_length(self, stock: Path, tmp_path: Path) -> None:
        utils = pytest.importorskip("trl.trainer.utils", reason="trl is not installed")
        model = extended(stock)
        assert stated(utils.create_model_from_path(model.config._name_or_path)) == {LONG}


class TestAdapters:
    def test_a_position_adapter(self, stock: Path, tmp_path: Path) -> None:
        save_position_adapter(extended(stock), tmp_path)
        model = load_position_adapter(base(stock), tmp_path)
        assert stated(model) == {LONG}
        assert stated(AutoModelForCausalLM.from_pretrained(model.name_or_path)) == {LONG}
        assert unpatch_model(model).config.max_position_embeddings == base(stock).config.max_position_embeddings

    def test_a_length_that_was_chosen_for_the_base_stays(self, stock: Path, tmp_path: Path) -> None:
        save_position_adapter(extended(stock, "alibi"), tmp_path)
        assert stated(load_position_adapter(base(stock, "alibi"), tmp_path)) == {LONG}
        own = extend_context(base(stock, "alibi"), length=300)
        assert stated(load_position_adapter(own, tmp_path)) == {300}

    @pytest.mark.parametrize("kind", ["AutoPeftModel", "PeftModel", "transformers"])
    def test_a_peft_adapter(self, stock: Path, tmp_path: Path, kind: str) -> None:
        adapted(extended(stock), LoraConfig(**LORA)).save_pretrained(tmp_path)
        load: dict[str, Callable[[], Any]] = {
            "AutoPeftModel": lambda: AutoPeftModelForCausalLM.from_pretrained(tmp_path),
            "PeftModel": lambda: PeftModel.from_pretrained(base(stock), tmp_path),
            "transformers": lambda: AutoModelForCausalLM.from_pretrained(tmp_path),
        }
        assert stated(load[kind]()) == {LONG}

    def test_a_file_of_an_older_version_has_none(self, stock: Path, tmp_path: Path) -> None:
        save_position_adapter(extended(stock), tmp_path)
        path = tmp_path / "position_encoding.json"
        entry = json.loads(path.read_text())
        assert entry.pop("length") == LONG
        # Format 1 has no hashes.
        entry = {name: value for name, value in entry.items() if "hash" not in name and "sha" not in name}
        entry["format"] = 1
        path.write_text(json.dumps(entry))
        assert stated(load_position_adapter(base(stock), tmp_path)) == stated(base(stock, "t5"))

    @pytest.mark.parametrize("length", ["long", 0, -1, True, 1.5, 2**31])
    def test_a_damaged_length_is_refused(self, stock: Path, tmp_path: Path, length: Any) -> None:
        save_position_adapter(extended(stock), tmp_path)
        path = tmp_path / "position_encoding.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"length": length}))
        with pytest.raises(CheckpointError, match="length"):
            load_position_adapter(base(stock), tmp_path)

    @pytest.mark.parametrize("kind", ["position adapter", "PEFT adapter"])
    def test_a_load_that_fails_leaves_scheme_parameters_and_length(
        self, stock: Path, tmp_path: Path, kind: str
    ) -> None:
        if kind == "PEFT adapter":
            adapted(extended(stock), LoraConfig(**LORA)).save_pretrained(tmp_path)
            (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
        else:
            save_position_adapter(extended(stock), tmp_path, adapter=str(tmp_path / "absent"))
        model = patch_model(base(stock), "t5")
        before, lengths = {name: tensor.clone() for name, tensor in model.state_dict().items()}, stated(model)
        with pytest.raises((OSError, ValueError, SafetensorError)):
            load_position_adapter(model, tmp_path)
        if kind == "PEFT adapter":  # PEFT leaves its layers in a model whose adapter it could not load.
            before = {name: tensor for name, tensor in before.items() if "position_encoding" in name}
        assert stated(model) == lengths != {LONG}
        after = model.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_length_outlives_a_scheme_that_reaches_less(stock: Path) -> None:
    model = extended(stock, "alibi")
    patch_model(model, "learned", num_positions=512)
    assert stated(model) == {512}
    patch_model(model, "binary", bits=7)
    assert stated(model) == {128}
    patch_model(model, "alibi")
    assert stated(model) == {LONG}
    patch_model(model, "learned", num_positions=512)
    extend_context(model, length=200)
    patch_model(model, "alibi")
    assert stated(model) == {200}
    unpatch_model(model)
    assert stated(patch_model(model, "alibi")) == stated(base(stock, "alibi"))
