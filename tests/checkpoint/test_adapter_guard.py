"""Adapters whose config, weights and scheme are separated, or come from different saves, are refused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, inject_adapter_in_model

from hf_posenc import (
    CheckpointError,
    UnsupportedError,
    load_position_adapter,
    native_scheme,
    patch_model,
    save_position_adapter,
    unpatch_model,
)
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.checkpoint.other_loaders import check_checkpoint
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import ABSENT, LORA, adapted, assert_same, base, edit_json, made
from tests.checkpoint.test_resuming import trainer
from tests.fresh import printed, run_fresh
from tests.models import tiny

FILES = ("position_encoding.json", "position_encoding.safetensors")


@pytest.fixture(scope="module")
def folder(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter on a model with ALiBi."""
    folder = tmp_path_factory.mktemp("alibi")
    adapted(base(stock, "alibi")).save_pretrained(folder)
    return folder


def _load_adapter(model: Any, config: Any, folder: Path) -> Any:
    model.load_adapter(adapter_state_dict=peft.load_peft_weights(str(folder)), peft_config=config)
    return model


def _set_state(model: Any, folder: Path) -> Any:
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder)))
    return model


def _add_adapter(model: Any, config: Any, folder: Path) -> Any:
    wrapped = get_peft_model(model, LoraConfig(**LORA), adapter_name="first")
    wrapped.add_adapter("default", config)
    wrapped.set_adapter("default")
    return _set_state(wrapped, folder)


ROUTES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "get_peft_model": lambda model, config, folder: _set_state(get_peft_model(model, config), folder),
    "mixed": lambda model, config, folder: get_peft_model(model, config, mixed=True),
    "inject": lambda model, config, folder: _set_state(inject_adapter_in_model(config, model), folder),
    "load_adapter of transformers": _load_adapter,
    "add_adapter": _add_adapter,
}


class TestConfigAndWeightsApart:
    @pytest.mark.parametrize("route", ROUTES)
    def test_only_a_model_with_the_same_positions_is_taken(self, route: str, folder: Path, stock: Path) -> None:
        for scheme in (None, "kerple"):
            model = base(stock, scheme)
            with pytest.raises(UnsupportedError, match=r"PeftModel\.from_pretrained"):
                ROUTES[route](model, PeftConfig.from_pretrained(folder), folder)
            if route == "inject":
                assert not any("lora" in name for name, _ in model.named_modules())
                assert_same(model, base(stock, scheme))
        if route != "mixed":
            found = ROUTES[route](base(stock, "alibi"), PeftConfig.from_pretrained(folder), folder)
            assert_same(found, PeftModel.from_pretrained(base(stock), folder))

    def test_prompts_are_refused_too(self, stock: Path, tmp_path: Path) -> None:
        prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        get_peft_model(base(stock, "alibi"), prompts).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedError, match="its stock positions"):
            get_peft_model(base(stock), PeftConfig.from_pretrained(tmp_path))

    def test_the_settings_may_be_used_for_a_new_adapter(self, folder: Path, stock: Path) -> None:
        config = PeftConfig.from_pretrained(folder)
        model = get_peft_model(base(stock), LoraConfig(**config.to_dict()))
        assert model.active_peft_config == config

    def test_a_mark_that_names_no_scheme_fits_patched_models_only(self, stock: Path, tmp_path: Path) -> None:
        adapted(base(stock, "alibi")).save_pretrained(tmp_path)
        edit_json(tmp_path / "adapter_config.json", "position_encoding", scheme=ABSENT, sha256=ABSENT)
        config = PeftConfig.from_pretrained(tmp_path)
        get_peft_model(base(stock, "alibi"), config)
        with pytest.raises(UnsupportedError, match="its stock positions"):
            get_peft_model(base(stock), config)


def _lora(**options: Any) -> LoraConfig:
    return LoraConfig(**({"target_modules": ["query", "q", "q_proj", "c_attn"], "r": 2} | options))


_ROWS = {"target_modules": ["wpe"], "token_indices": [1]}
#: Model, scheme, config, and the field that selects something it should not.
WITHOUT_EFFECT: dict[str, tuple[str, str, Callable[[], Any], str]] = {
    "table saved": ("GPT2LMHeadModel", "alibi", lambda: _lora(modules_to_save=["wpe"]), "modules_to_save"),
    "adopted table": ("BertForMaskedLM", "native", lambda: _lora(modules_to_save=["embeddings"]), "modules_to_save"),
    "table adapted": ("GPT2LMHeadModel", "rope", lambda: _lora(target_modules=["c_attn", "wpe"]), "target_modules"),
    "pattern": ("GPT2LMHeadModel", "rope", lambda: _lora(target_modules=r".*\.wpe"), "target_modules"),
    "rows": ("GPT2LMHeadModel", "none", lambda: _lora(trainable_token_indices={"wpe": [1]}), "trainable_token_indices"),
    "rows alone": ("GPT2LMHeadModel", "none", lambda: peft.TrainableTokensConfig(**_ROWS), "target_modules"),
    "relative bias": (
        "T5ForConditionalGeneration", "alibi", lambda: _lora(modules_to_save=["relative_attention_bias"]),
        "modules_to_save",
    ),
    "parameter": ("ViTModel", "rope_nd", lambda: _lora(target_parameters=["position_embeddings"]), "target_parameters"),
    "vectors of the scheme": ("BertForMaskedLM", "learned", lambda: _lora(modules_to_save=["additive"]), "add_lora"),
    "attention saved": ("LlamaForCausalLM", "fire", lambda: _lora(modules_to_save=["self_attn"]), "computes attention"),
    "layer saved": ("BertForMaskedLM", "alibi", lambda: _lora(modules_to_save=["layer.1"]), "computes attention"),
    "whole scheme": ("BertForMaskedLM", "t5", lambda: _lora(modules_to_save=["position_encoding"]), "add_lora"),
}  # fmt: skip


def names_of(model: Any) -> list[str]:
    return [name for name, _ in model.named_modules()]


class TestWhatWouldBeTrained:
    @pytest.mark.parametrize("case", WITHOUT_EFFECT)
    def test_what_has_no_effect_is_refused(self, case: str) -> None:
        kind, scheme, config, message = WITHOUT_EFFECT[case]
        model = tiny(kind)
        patch_model(model, native_scheme(model) if scheme == "native" else scheme)
        names = names_of(model)
        for add in (get_peft_model, lambda model, config: inject_adapter_in_model(config, model)):
            with pytest.raises(UnsupportedError, match=message):
                add(model, config())
        assert names == names_of(model)
        if isinstance(config(), LoraConfig):
            wrapped = get_peft_model(model, _lora())
            with pytest.raises(UnsupportedError, match=message):
                wrapped.add_adapter("second", config())
        # The stock model has no such module, or may have a copy of it.
        if case == "parameter" or message in ("add_lora", "computes attention"):
            return
        # An adapter of what a scheme discards is removed before the scheme is placed.
        wrapped = get_peft_model(tiny(kind), config())
        names = names_of(wrapped)
        for wanted in (scheme, "native"):
            with pytest.raises(UnsupportedError, match=r"holds a part of an adapter.*model.unload\(\)"):
                patch_model(wrapped, wanted)
            assert names == names_of(wrapped)
        patch_model(wrapped.unload(), scheme)

    def test_what_acts_is_not(self) -> None:
        for kind, scheme in (("BertForMaskedLM", "alibi"), ("GPT2LMHeadModel", "native")):
            model = tiny(kind)
            patch_model(model, native_scheme(model) if scheme == "native" else scheme)
            before = model(torch.arange(5)[None]).logits
            for config in (_lora(modules_to_save=["wte", "word_embeddings"]), _lora(target_modules="all-linear")):
                wrapped = get_peft_model(model, config)
                torch.testing.assert_close(wrapped(torch.arange(5)[None]).logits, before)
                model = wrapped.unload()

    def test_all_linear_leaves_out_what_has_no_effect(self) -> None:
        model = patch_model(tiny("Wav2Vec2ConformerModel"), "alibi")
        wrapped = get_peft_model(model, _lora(target_modules="all-linear"))
        adapted = {name.rpartition(".")[2] for name, module in wrapped.named_modules() if hasattr(module, "lora_A")}
        assert "linear_q" in adapted
        assert "linear_pos" not in adapted


HOTSWAP = """
from peft.utils.hotswap import hotswap_adapter
import sys
import hf_posenc
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

stock, *folders = sys.argv[1:]
for first, second in zip(folders[::2], folders[1::2]):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(stock), first)
    try:
        hotswap_adapter(model, second, "default", torch_device="cpu")
    except hf_posenc.UnsupportedError as error:
        print("refused:", error)
        continue
    wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(stock), second)
    ids = torch.arange(12)[None]
    print("equal:", torch.equal(model(ids).logits, wanted(ids).logits))
"""


def test_a_hotswap_imported_before_the_package(stock: Path, tmp_path: Path) -> None:
    folders = []
    for number, scheme in enumerate([None, "alibi", "kerple", "alibi", "t5", "t5"]):
        folders.append(str(tmp_path / str(number)))
        adapted(base(stock, scheme)).save_pretrained(folders[-1])
    # kerple stays where it is: an adapter that was trained with alibi is not put there
    first, second, third = printed(run_fresh(HOTSWAP, stock, *folders)).splitlines()
    assert (first, third) == ("equal: True", "equal: True")
    assert second.startswith("refused:")


def test_an_edited_config_is_named_or_read_as_it_was(folder: Path, stock: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path, wanted = tmp_path / "adapter_config.json", PeftModel.from_pretrained(base(stock), folder)
    for peft_type in ("LORA", None, ABSENT):  # The sentence hides this value, but a caller may still pass it.
        edit_json(path, peft_type=peft_type)
        assert_same(PeftModel.from_pretrained(base(stock), tmp_path), wanted)
    text = path.read_text()
    for damaged in (f"{text.rstrip()[:-1]},}}", f"[{text}]"):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"adapter_config\.json of .* has content that cannot be read"):
            PeftModel.from_pretrained(base(stock), tmp_path)


class TestFilesOfAnEarlierSave:
    def test_a_save_without_a_scheme_removes_them(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"))
        model.save_pretrained(tmp_path)
        assert all((tmp_path / name).is_file() for name in FILES)
        unpatch_model(model)
        model.save_pretrained(tmp_path)
        assert not any((tmp_path / name).exists() for name in FILES)
        assert_same(PeftModel.from_pretrained(base(stock), tmp_path), model)

    def test_a_scheme_saved_alone_is_not_removed(self, stock: Path, tmp_path: Path) -> None:
        save_position_adapter(base(stock, "t5"), tmp_path)
        adapted(base(stock)).save_pretrained(tmp_path)
        assert all((tmp_path / name).is_file() for name in FILES)

    @pytest.mark.parametrize("form", ["unmarked", "missing"])
    def test_a_scheme_beside_an_adapter_without_one_is_refused(self, form: str, stock: Path, tmp_path: Path) -> None:
        adapted(base(stock, "t5")).save_pretrained(tmp_path)
        path = tmp_path / "adapter_config.json"
        disk = json.loads(path.read_text())
        path.unlink()
        if form == "unmarked":
            path.write_text(json.dumps(disk["position_encoding"]["adapter"]))
        model = base(stock)
        with pytest.raises(CheckpointError, match="PEFT adapter"):
            load_position_adapter(model, tmp_path)
        assert not hasattr(model, "position_encoding")


def test_an_adapter_that_names_no_scheme_is_trained_on_in_a_stock_model_only(tmp_path: Path) -> None:
    stock = get_peft_model(made(), LoraConfig(**LORA))
    stock.save_pretrained(tmp_path)
    check_checkpoint(trainer(stock, tmp_path, 1), tmp_path)
    patched = get_peft_model(made("alibi"), LoraConfig(**LORA))
    with pytest.raises(SchemeMismatchError, match=r"save it there again"):
        check_checkpoint(trainer(patched, tmp_path, 1), tmp_path)
    # The remedy.
    with pytest.warns(UserWarning, match="names no position encoding"):
        model = PeftModel.from_pretrained(made("alibi"), tmp_path)
    model.save_pretrained(tmp_path)
    check_checkpoint(trainer(patched, tmp_path, 1), tmp_path)


def _optimised(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.position_encoding.parameters(), lr=0.1)
    model(torch.arange(1, 9).unsqueeze(0), labels=torch.arange(1, 9).unsqueeze(0)).loss.backward()
    optimizer.step()
    return model


def _frozen(model: Any) -> Any:
    model.position_encoding.requires_grad_(False)
    return model


def _thawed(model: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(**LORA))
    model.position_encoding.requires_grad_(True)
    return adapted


def _reloaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def _with_lora(model: Any, *_: Any) -> Any:
    return get_peft_model(model, LoraConfig(**LORA))


PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
#: Whether the first training call warns: name of the scheme, and what gives the patched model an adapter.
FREEZING: dict[str, tuple[str, Any, bool]] = {
    "lora": ("fire", _with_lora, True),
    "a table": ("learned", _with_lora, True),
    "prompt tuning": ("fire", lambda model, _: get_peft_model(model, peft.PromptTuningConfig(**PROMPT)), True),
    "injected": ("fire", lambda model, _: inject_adapter_in_model(LoraConfig(**LORA), model) and model, True),
    "cast": ("fire", lambda model, _: _with_lora(model.to(torch.bfloat16)), True),
    "suspended": ("fire", lambda model, _: native_scheme(model) and _with_lora(model), True),
    "no parameters": ("alibi", _with_lora, False),
    "adopted": ("native", _with_lora, False),
    "add_lora": ("fire", lambda model, _: add_lora(model, LoraConfig(**LORA)), False),
    "made trainable": ("fire", lambda model, _: _thawed(model), False),
    "frozen before": ("fire", lambda model, _: _with_lora(_frozen(model)), False),
    "trained before": ("fire", lambda model, _: _with_lora(_optimised(model)), False),
    "loaded": ("fire", lambda model, folder: _with_lora(_reloaded(model, folder)), False),
}


@pytest.mark.parametrize("case", FREEZING)
def test_a_new_scheme_that_an_adapter_freezes_is_named_in_the_first_training_call(case: str, tmp_path: Path) -> None:
    scheme, adapt, warns = FREEZING[case]
    model = adapt(patch_model(made(), scheme), tmp_path)
    ids = torch.arange(1, 9).unsqueeze(0)
    with warnings.catch_warnings(record=True, action="always") as shown:
        model.eval()(input_ids=ids)
        assert not [one for one in shown if "PEFT has frozen" in str(one.message)]
        for _ in range(2):
            model.train()(input_ids=ids, labels=ids)
    found = [str(one.message) for one in shown if "PEFT has frozen" in str(one.message)]
    assert len(found) == warns
    assert all(f"{scheme!r}" in message and "add_lora(model, config)" in message for message in found)
