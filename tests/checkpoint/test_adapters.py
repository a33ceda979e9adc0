"""PEFT adapters of models that were patched in memory carry the scheme, its parameters, and what they belong on."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("peft")

import peft
import torch
from peft import AdaptionPromptConfig, AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_posenc import CheckpointError, UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.checkpoint.adapter_config import SENTENCE
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import (
    LORA,
    adapted,
    as_format_1,
    assert_same,
    base,
    outputs,
    randomize,
    refused,
)
from tests.checkpoint.test_resuming import trainer
from tests.models import tiny


@pytest.fixture(scope="module", params=["alibi", "t5"])
def saved(request: pytest.FixtureRequest, stock: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of an adapter on a patched model, and the model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = adapted(base(stock, request.param))
    model.save_pretrained(folder)
    return folder, model


def _load_adapter(folder: Path, stock: Path) -> Any:
    model = base(stock)
    model.load_adapter(folder)
    return model


def _unsaved_scheme(folder: Path, stock: Path) -> Any:
    """A base with the same scheme, whose parameters are fresh."""
    scheme = json.loads((folder / "position_encoding.json").read_text())["scheme"]
    return PeftModel.from_pretrained(patch_model(base(stock), scheme), folder)


ROUTES: dict[str, Callable[[Path, Path], Any]] = {
    "PeftModel on a stock base": lambda folder, stock: PeftModel.from_pretrained(base(stock), folder),
    "PeftModel on a base with the scheme": _unsaved_scheme,
    "AutoPeftModel": lambda folder, stock: AutoPeftModelForCausalLM.from_pretrained(folder),
    "AutoModel": lambda folder, stock: AutoModelForCausalLM.from_pretrained(folder),
    "model class": lambda folder, stock: LlamaForCausalLM.from_pretrained(folder),
    "load_adapter of transformers": _load_adapter,
    "low_cpu_mem_usage": lambda folder, stock: PeftModel.from_pretrained(base(stock), folder, low_cpu_mem_usage=True),
}


class TestLoading:
    @pytest.mark.parametrize("route", ROUTES)
    def test_the_adapted_model_comes_back(self, route: str, saved: tuple[Path, Any], stock: Path) -> None:
        folder, model = saved
        found = ROUTES[route](folder, stock)
        assert found.position_encoding.config == model.position_encoding.config
        assert_same(found, model)

    def test_the_adapter_and_the_scheme_both_act(self, saved: tuple[Path, Any], stock: Path) -> None:
        _, model = saved
        with model.disable_adapter():
            without = outputs(model)
        assert (outputs(model) - without).abs().max() > 1e-2
        assert (without - outputs(base(stock))).abs().max() > 1e-2

    def test_the_config_is_hidden_from_others_and_reads_as_ever(self, saved: tuple[Path, Any], stock: Path) -> None:
        """Servers and converters read rank and target modules without looking at the type."""
        on_disk = json.loads((saved[0] / "adapter_config.json").read_text())
        assert set(on_disk) == {"peft_type", "base_model_name_or_path", "revision", "position_encoding"}
        config = PeftConfig.from_pretrained(saved[0])
        assert isinstance(config, LoraConfig)
        assert (config.r, config.base_model_name_or_path) == (2, str(stock))
        targets = [
            set(get_peft_model(base(stock, scheme), LoraConfig()).peft_config["default"].target_modules)
            for scheme in (None, "alibi")
        ]
        assert targets[0] == targets[1]

    def test_in_a_subfolder_on_a_saved_patched_model(self, stock: Path, tmp_path: Path) -> None:
        base(stock, "t5").save_pretrained(tmp_path / "base")
        model = adapted(base(tmp_path / "base"))
        model.save_pretrained(tmp_path / "adapter")
        for route in ("AutoPeftModel", "AutoModel", "PeftModel on a stock base"):
            assert_same(ROUTES[route](tmp_path / "adapter", tmp_path / "base"), model)
        stock_base = unpatch_model(base(tmp_path / "base"))
        assert_same(PeftModel.from_pretrained(stock_base, tmp_path, subfolder="adapter"), model)

    def test_without_a_scheme_it_is_peft_s_own_and_a_patched_model_warns(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock))
        model.save_pretrained(tmp_path)
        assert not (tmp_path / "position_encoding.json").exists()
        assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*position encoding.*")
            assert_same(PeftModel.from_pretrained(base(stock), tmp_path), model)
        with pytest.warns(UserWarning, match="names no position encoding") as caught:
            PeftModel.from_pretrained(base(stock, "alibi"), tmp_path)
        assert sum("names no position encoding" in str(warning.message) for warning in caught) == 1


class TestRefusals:
    def test_another_scheme(self, saved: tuple[Path, Any], stock: Path) -> None:
        model = base(stock, "kerple")
        with refused("Load it on the stock model", model, error=UnsupportedError):
            PeftModel.from_pretrained(model, saved[0])

    @pytest.mark.parametrize("missing", ["position_encoding.json", "position_encoding.safetensors"])
    def test_half_a_folder(self, stock: Path, tmp_path: Path, missing: str) -> None:
        adapted(base(stock, "t5")).save_pretrained(tmp_path)
        (tmp_path / missing).unlink()
        model = base(stock)
        with pytest.raises(CheckpointError, match=missing):
            PeftModel.from_pretrained(model, tmp_path)
        assert not hasattr(model, "position_encoding")

    def test_a_base_is_stock_again_where_the_adapter_cannot_be_loaded(self, stock: Path, tmp_path: Path) -> None:
        adapted(base(stock, "alibi")).save_pretrained(tmp_path)
        (tmp_path / "adapter_model.safetensors").write_bytes(b"not a file of tensors")
        model = base(stock)
        with pytest.raises(CheckpointError, match=r"another adapter_model\.safetensors"):
            PeftModel.from_pretrained(model, tmp_path)
        as_format_1(tmp_path)  # It does not name the weights.
        with pytest.raises(Exception, match="header"):
            PeftModel.from_pretrained(model, tmp_path)
        assert not hasattr(model, "position_encoding")

    @pytest.mark.parametrize("scheme", [None, "t5"])
    def test_a_model_is_not_saved_beside_an_adapter_that_would_be_added_to_it(
        self, scheme: str | None, stock: Path, tmp_path: Path
    ) -> None:
        adapted(base(stock, scheme)).save_pretrained(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(UnsupportedError, match="would add this adapter"):
            base(stock, "alibi").save_pretrained(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class TestSeveralAdapters:
    def test_a_second_one_with_the_same_scheme_shares_it_and_no_other_is_taken(
        self, stock: Path, tmp_path: Path
    ) -> None:
        model = adapted(base(stock, "t5"))
        model.add_adapter("second", LoraConfig(**LORA))
        model.save_pretrained(tmp_path)
        strange = base(stock, "t5")
        randomize(strange.position_encoding)
        adapted(strange).save_pretrained(tmp_path / "strange")
        found = PeftModel.from_pretrained(base(stock), tmp_path)
        found.load_adapter(tmp_path / "second", "second")
        for name in ("default", "second"):
            model.set_adapter(name), found.set_adapter(name)
            assert_same(found, model)
        with pytest.raises(UnsupportedError, match="share the scheme"):
            found.load_adapter(tmp_path / "strange", "third")
        assert_same(found, model)

    def test_one_with_a_scheme_beside_one_without_is_refused(self, saved: tuple[Path, Any], stock: Path) -> None:
        model = adapted(base(stock))
        with pytest.raises(UnsupportedError, match="stock positions"):
            model.load_adapter(saved[0], "second")
        assert not hasattr(model.get_base_model(), "position_encoding")

    def test_hotswapping_asks_too(self, saved: tuple[Path, Any], stock: Path) -> None:
        folder, model = saved
        with pytest.raises(UnsupportedError, match="Load it on"):
            hotswap_adapter(adapted(base(stock, "kerple")), folder, "default")
        found = adapted(patch_model(base(stock), model.position_encoding.config))
        hotswap_adapter(found, folder, "default", torch_device="cpu")
        assert_same(found, model)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**(LORA | options))


class Method(NamedTuple):
    """A kind of adapter.

    Args:
        merged: whether PEFT loads an adapter that was merged when it was saved.
        beside: whether PEFT loads it beside another one.
    """

    config: Callable[[], Any]
    merged: bool = True
    beside: bool = True


_TASK = {"task_type": "CAUSAL_LM"}
METHODS: dict[str, Method] = {
    "lora": Method(lora),
    "all linear": Method(
        lambda: lora(target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"], bias="all")
    ),
    "dora": Method(lambda: lora(use_dora=True)),
    # They decompose the weights, which is repeated while loading.
    "pissa": Method(lambda: lora(init_lora_weights="pissa")),
    "olora": Method(lambda: lora(init_lora_weights="olora")),
    "a layer and norms saved": Method(lambda: lora(modules_to_save=["mlp", "norm", "embed_tokens"])),
    "embeddings": Method(lambda: lora(target_modules=["embed_tokens", "q_proj", "lm_head"]), merged=False),
    "trainable tokens": Method(lambda: lora(trainable_token_indices=[4, 5]), beside=False),
    "target parameters": Method(lambda: lora(target_parameters=["up_proj.weight"])),
    "replicated": Method(lambda: lora(layer_replication=[[0, 2], [0, 2]]), merged=False),
    "replicated backwards": Method(lambda: lora(layer_replication=[[1, 2], [0, 2]]), merged=False),
    "norm tuning": Method(lambda: peft.LNTuningConfig(**_TASK), merged=False, beside=False),
    "boft": Method(lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4, **_TASK), beside=False),
    "oft": Method(lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, **_TASK), beside=False),
    "ia3": Method(lambda: peft.IA3Config(**_TASK), merged=False, beside=False),
    "vera": Method(lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=2, **_TASK), beside=False),
    "loha": Method(lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2, **_TASK), beside=False),
}


@pytest.fixture(scope="module")
def plain(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter on the base with T5's bias."""
    folder = tmp_path_factory.mktemp("plain")
    adapted(base(stock, "t5")).save_pretrained(folder)
    return folder


def cycle(model: Any) -> None:
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_back_on_its_base_and_fits_no_other(
    name: str, plain: Path, stock: Path, other: Path, tmp_path: Path
) -> None:
    """Only weights that PEFT has not changed are compared, with new, cycled and merged adapters."""
    method = METHODS[name]
    model = adapted(base(stock, "t5"), method.config())
    expected = outputs(model)
    for life in (None, cycle, lambda model: model.merge_adapter()):
        if life is not None:
            life(model)
        folder = tmp_path / getattr(life, "__name__", "new")
        model.save_pretrained(folder)
        found = PeftModel.from_pretrained(base(stock), folder)
        if life is None or method.merged:
            # Merged, the products are added in another order; PiSSA and OLoRA decompose again.
            exact = life is None and name not in ("pissa", "olora")
            assert_same(found, expected, 0.0 if exact else 2e-3)
        for stranger in (base(other), base(other, "t5")):
            with pytest.raises(CheckpointError, match="different weights"):
                PeftModel.from_pretrained(stranger, folder)
        if method.beside and life is not None:
            life(found)
            found.load_adapter(plain, "second")
    if method.beside:
        stranger = adapted(base(other, "t5"), method.config())
        cycle(stranger)
        with pytest.raises(CheckpointError, match="different weights"):
            stranger.load_adapter(plain, "second")


@pytest.mark.parametrize("name", ["lora", "pissa", "all linear", "replicated"])
def test_patched_after_the_adapter_was_made(name: str, stock: Path, other: Path, tmp_path: Path) -> None:
    model = patch_model(adapted(base(stock), METHODS[name].config()), "alibi")
    cycle(model)
    model.save_pretrained(tmp_path)
    assert_same(PeftModel.from_pretrained(base(stock), tmp_path), model, 2e-3)
    if name != "all linear":  # Only norms of ones are left.
        with pytest.raises(CheckpointError, match="different weights"):
            PeftModel.from_pretrained(base(other), tmp_path)


class TestTrainedBase:
    def test_unloaded_it_is_the_base_again_and_merged_a_patched_model(
        self, saved: tuple[Path, Any], stock: Path, tmp_path: Path
    ) -> None:
        folder, model = saved
        found = PeftModel.from_pretrained(base(stock), folder)
        cycle(found)
        merged = PeftModel.from_pretrained(found.unload(), folder).merge_and_unload()
        with pytest.raises(CheckpointError, match="different weights"):
            PeftModel.from_pretrained(merged, folder)
        merged.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_same(again, merged)
        # Merging adds the same products in another order; logits are near 3.
        assert_same(again, model, 1e-4)

    def test_a_weight_that_is_trained_outside_of_the_adapter_belongs_to_the_base(
        self, stock: Path, tmp_path: Path
    ) -> None:
        model = get_peft_model(base(stock, "alibi"), lora())
        model.get_input_embeddings().weight.requires_grad_(True).data.add_(0.1)
        model.save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match="embed_tokens"):
            PeftModel.from_pretrained(base(stock), tmp_path)

    def test_a_base_in_half_precision(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "alibi", dtype=torch.bfloat16))
        cycle(model)
        model.save_pretrained(tmp_path)
        adapted(base(stock, "alibi")).save_pretrained(tmp_path / "second")
        for dtype in (torch.bfloat16, torch.float32):
            found = PeftModel.from_pretrained(base(stock, dtype=dtype), tmp_path)
            found.load_adapter(tmp_path / "second", "second")

    def test_a_scheme_that_is_trained_beside_lora_resumes(self, stock: Path, tmp_path: Path) -> None:
        def model() -> Any:
            torch.manual_seed(5)
            return add_lora(base(stock, "t5"), lora())

        options = {"learning_rate": 1e-2}
        whole, resumed = model(), model()
        trainer(whole, tmp_path / "whole", 4, **options).train()
        before, after = (list(each.position_encoding.parameters()) for each in (resumed, whole))
        assert max(float((new - old).abs().max()) for old, new in zip(before, after, strict=True)) > 1e-3
        trainer(model(), tmp_path / "halves", 2, **options).train()
        trainer(resumed, tmp_path / "halves", 4, **options).train(resume_from_checkpoint=True)
        assert_same(resumed, whole)
        assert_same(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "halves" / "checkpoint-4"), whole)

    def test_adapters_inside_a_transformers_model(self, stock: Path, tmp_path: Path) -> None:
        model = base(stock, "t5")
        try:
            model.add_adapter(lora())
        except ValueError as error:
            if "version of PEFT" not in str(error):
                raise
            pytest.skip(f"transformers refuses the installed PEFT: {error}")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        assert "PeftModel.from_pretrained(base" in (tmp_path / "README.md").read_text()
        assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == SENTENCE
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def prompted(model: Any) -> Any:
    """With adaption prompts, which compute the queries of a layer again."""
    wrapped = get_peft_model(model, AdaptionPromptConfig(adapter_layers=2, adapter_len=4, **_TASK))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "adaption" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()


class TestAdaptionPrompts:
    @pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM"])
    def test_they_act_decode_and_come_back(self, kind: str, tmp_path: Path) -> None:
        stock = tiny(kind).eval()
        model = copy.deepcopy(stock)
        expected = prompted(copy.deepcopy(stock))
        # The same operations; a placed mapping rotates in another order.
        assert_same(prompted(patch_model(model, native_scheme(model))), expected, 1e-5)
        for scheme in ("alibi", "t5", "sinusoidal"):
            model = patch_model(copy.deepcopy(stock), scheme)
            before = outputs(model)
            wrapped = prompted(model)
            assert (outputs(wrapped) - before).abs().max() > 1e-4
            ids = torch.arange(3, 15)[None]
            tokens = wrapped.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
            whole = wrapped(tokens).logits[:, ids.shape[1] - 1 : -1].argmax(-1)
            assert torch.equal(whole, tokens[:, ids.shape[1] :])
            wrapped.save_pretrained(tmp_path / scheme)
            assert_same(PeftModel.from_pretrained(copy.deepcopy(stock), tmp_path / scheme), wrapped)

    def test_a_rotation_they_cannot_follow_is_refused_and_so_is_a_change_under_them(self) -> None:
        with pytest.raises(UnsupportedError, match="adaption prompts"):
            prompted(patch_model(tiny("LlamaForCausalLM"), "rope", theta=123.0))
        with pytest.raises(UnsupportedError, match="or remove them"):
            patch_model(prompted(tiny("LlamaForCausalLM")), "alibi")
