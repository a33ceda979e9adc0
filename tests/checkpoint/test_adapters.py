"""PEFT adapters of models that were patched in memory carry the scheme, its parameters, and what they belong on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from hf_posenc import CheckpointError, UnsupportedError, patch_model, unpatch_model
from hf_posenc.checkpoint.adapter_config import SENTENCE
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import as_format_1, llama, randomize
from tests.checkpoint.stock_folder import write_stock_llama
from tests.fresh import run_fresh

IDS = torch.arange(3, 17).unsqueeze(0)
LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "r": 2}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stock_llama(tmp_path_factory.mktemp("stock"))


def base(folder: Path, scheme: str | None = None, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if scheme is not None:
        randomize(patch_model(model, scheme).position_encoding)
    return model


def adapted(model: Any, config: Any = None) -> Any:
    """A PEFT model whose adapter does something."""
    wrapped = get_peft_model(model, config or LoraConfig(**LORA))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


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
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)

    def test_the_adapter_and_the_scheme_both_act(self, saved: tuple[Path, Any], stock: Path) -> None:
        _, model = saved
        with model.disable_adapter():
            without = logits(model)
        assert (logits(model) - without).abs().max() > 1e-2
        assert (without - logits(base(stock))).abs().max() > 1e-2

    def test_a_process_without_the_package_stops_with_the_sentence(self, stock: Path, tmp_path: Path) -> None:
        adapted(base(stock, "t5")).save_pretrained(tmp_path)
        code = (
            "import json, sys\n"
            "from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel\n"
            "from transformers import AutoModelForCausalLM, LlamaForCausalLM\n"
            "folder, stock = sys.argv[1:]\n"
            "routes = [lambda: PeftConfig.from_pretrained(folder),\n"
            "    lambda: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(stock), folder),\n"
            "    lambda: AutoPeftModelForCausalLM.from_pretrained(folder),\n"
            "    lambda: AutoModelForCausalLM.from_pretrained(folder),\n"
            "    lambda: LlamaForCausalLM.from_pretrained(folder),\n"
            "    lambda: AutoModelForCausalLM.from_pretrained(stock).load_adapter(folder)]\n"
            "found = []\n"
            "for load in routes:\n"
            "    try:\n"
            "        load()\n"
            "        found.append('LOADED')\n"
            "    except Exception as error:\n"
            "        found.append(str(error))\n"
            "assert 'hf_posenc' not in sys.modules\n"
            "print('FOUND', json.dumps(found))\n"
        )
        done = run_fresh(code, tmp_path, stock, folder=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        messages = json.loads(done.stdout.split("FOUND ")[1])
        assert len(messages) == 6
        for message in messages:
            assert SENTENCE in message

    def test_nothing_in_the_folder_reads_as_a_stock_adapter(self, saved: tuple[Path, Any]) -> None:
        """Servers and converters read rank and target modules without looking at the type."""
        on_disk = json.loads((saved[0] / "adapter_config.json").read_text())
        assert set(on_disk) == {"peft_type", "base_model_name_or_path", "revision", "position_encoding"}

    def test_the_config_reads_as_ever(self, saved: tuple[Path, Any], stock: Path) -> None:
        config = PeftConfig.from_pretrained(saved[0])
        assert isinstance(config, LoraConfig)
        assert (config.r, config.base_model_name_or_path) == (2, str(stock))

    def test_in_a_subfolder(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"))
        model.save_pretrained(tmp_path / "inner")
        found = PeftModel.from_pretrained(base(stock), tmp_path, subfolder="inner")
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)


class TestRefusals:
    def test_weights_that_it_was_not_trained_on(self, saved: tuple[Path, Any], tmp_path: Path) -> None:
        other = randomize(randomize(llama()))
        before = logits(other)
        with pytest.raises(CheckpointError, match=r"trained on other weights.*\d+ of \d+ tensors differ"):
            PeftModel.from_pretrained(other, saved[0])
        assert not hasattr(other, "position_encoding")
        torch.testing.assert_close(logits(other), before, rtol=0, atol=0)

    def test_a_sibling_with_one_layer_tuned(self, saved: tuple[Path, Any], stock: Path) -> None:
        sibling = base(stock)
        with torch.no_grad():
            sibling.model.layers[1].mlp.down_proj.weight.mul_(1.001)
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight"):
            PeftModel.from_pretrained(sibling, saved[0])

    def test_another_scheme(self, saved: tuple[Path, Any], stock: Path) -> None:
        with pytest.raises(UnsupportedError, match="Load it on the stock model"):
            PeftModel.from_pretrained(base(stock, "kerple"), saved[0])

    def test_an_adapter_without_a_scheme_on_a_patched_model_warns(self, stock: Path, tmp_path: Path) -> None:
        adapted(base(stock)).save_pretrained(tmp_path)
        assert not (tmp_path / "position_encoding.json").exists()
        with pytest.warns(UserWarning, match="names no position encoding") as caught:
            PeftModel.from_pretrained(base(stock, "alibi"), tmp_path)
        assert sum("names no position encoding" in str(warning.message) for warning in caught) == 1

    def test_an_adapter_without_a_scheme_on_a_stock_model_is_peft_s_own(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock))
        model.save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*position encoding.*")
            found = PeftModel.from_pretrained(base(stock), tmp_path)
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"

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

    def test_a_save_that_is_killed_leaves_nothing_that_loads(
        self, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapted(base(stock)).save_pretrained(tmp_path)
        monkeypatch.setattr("peft.peft_model.safe_save_file", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            adapted(base(stock, "t5")).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="Can't find"):
            PeftModel.from_pretrained(base(stock), tmp_path)


class TestSeveralAdapters:
    def test_a_second_one_with_the_same_scheme_shares_it(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"))
        model.add_adapter("second", LoraConfig(**LORA))
        model.save_pretrained(tmp_path)
        found = PeftModel.from_pretrained(base(stock), tmp_path)
        found.load_adapter(tmp_path / "second", "second")
        for name in ("default", "second"):
            model.set_adapter(name), found.set_adapter(name)
            torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)

    def test_one_with_other_parameters_of_the_scheme_is_refused(self, stock: Path, tmp_path: Path) -> None:
        for name in ("first", "second"):
            model = base(stock, "t5")
            if name == "second":
                randomize(model.position_encoding)
            adapted(model).save_pretrained(tmp_path / name)
        found = PeftModel.from_pretrained(base(stock), tmp_path / "first")
        before = logits(found)
        with pytest.raises(UnsupportedError, match="share the scheme"):
            found.load_adapter(tmp_path / "second", "second")
        torch.testing.assert_close(logits(found), before, rtol=0, atol=0)

    def test_one_with_a_scheme_beside_one_without_is_refused(self, saved: tuple[Path, Any], stock: Path) -> None:
        model = adapted(base(stock))
        with pytest.raises(UnsupportedError, match="stock positions"):
            model.load_adapter(saved[0], "second")
        assert not hasattr(model.get_base_model(), "position_encoding")

    def test_hotswapping_asks_too(self, saved: tuple[Path, Any], stock: Path, tmp_path: Path) -> None:
        folder, model = saved
        found = adapted(base(stock, "kerple"))
        with pytest.raises(UnsupportedError, match="Load it on"):
            hotswap_adapter(found, folder, "default")
        found = adapted(patch_model(base(stock), model.position_encoding.config))
        hotswap_adapter(found, folder, "default", torch_device="cpu")
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)


METHODS = {
    "dora": lambda: LoraConfig(use_dora=True, **LORA),
    "biases": lambda: LoraConfig(bias="all", **LORA),
    "pissa": lambda: LoraConfig(init_lora_weights="pissa", **LORA),
    "modules_to_save": lambda: LoraConfig(modules_to_save=["embed_tokens", "norm"], **LORA),
    "token indices": lambda: LoraConfig(trainable_token_indices=[4, 5], **LORA),
    "embeddings": lambda: LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "lm_head"], r=2),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=2, task_type="CAUSAL_LM"),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, task_type="CAUSAL_LM"),
    "norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_back(method: str, stock: Path, tmp_path: Path) -> None:
    model = adapted(base(stock, "t5"), METHODS[method]())
    model.save_pretrained(tmp_path)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    # PiSSA's own decomposition is repeated while loading; everything else is the same operations on the same numbers.
    tolerance = 1e-4 if method == "pissa" else 0
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=tolerance)


class TestTraining:
    def rows(self) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(3, 60, (12,), generator=generator) for _ in range(8)]
        return [{"input_ids": row, "labels": row} for row in ids]

    def trainer(self, model: Any, folder: Path, steps: int) -> Trainer:
        arguments = TrainingArguments(
            str(folder), max_steps=steps, save_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True,
            per_device_train_batch_size=2, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        return Trainer(model, args=arguments, train_dataset=self.rows())

    def model(self, stock: Path) -> Any:
        torch.manual_seed(5)
        return add_lora(base(stock, "t5"), LoraConfig(**LORA))

    def test_a_scheme_that_is_trained_beside_lora_resumes(self, stock: Path, tmp_path: Path) -> None:
        whole = self.model(stock)
        self.trainer(whole, tmp_path / "whole", 4).train()
        before = torch.cat([parameter.flatten() for parameter in base(stock, "t5").position_encoding.parameters()])
        after = torch.cat([parameter.flatten() for parameter in whole.position_encoding.parameters()]).detach()
        assert (after - before).abs().max() > 1e-3
        self.trainer(self.model(stock), tmp_path / "halves", 2).train()
        resumed = self.model(stock)
        self.trainer(resumed, tmp_path / "halves", 4).train(resume_from_checkpoint=True)
        torch.testing.assert_close(logits(resumed), logits(whole), rtol=0, atol=0)
        found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "halves" / "checkpoint-4")
        torch.testing.assert_close(logits(found), logits(whole), rtol=0, atol=0)

    def test_merged_it_is_a_patched_model(self, saved: tuple[Path, Any], stock: Path, tmp_path: Path) -> None:
        folder, model = saved
        merged = PeftModel.from_pretrained(base(stock), folder).merge_and_unload()
        merged.save_pretrained(tmp_path)
        found = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(found), logits(merged), rtol=0, atol=0)
        # Merging adds the same products in another order; logits are near 3.
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-4)

    def test_merged_in_place_it_is_saved_with_the_same_base(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"))
        model.merge_adapter()
        model.save_pretrained(tmp_path)
        model.unmerge_adapter()
        found = PeftModel.from_pretrained(base(stock), tmp_path)
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-4)

    def test_adapters_inside_a_transformers_model(self, stock: Path, tmp_path: Path) -> None:
        model = base(stock, "t5")
        try:
            model.add_adapter(LoraConfig(**LORA))
        except ValueError as error:
            if "version of PEFT" not in str(error):
                raise
            pytest.skip(f"transformers refuses the installed PEFT: {error}")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == SENTENCE
        found = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)


def test_an_adapter_on_a_saved_patched_model(stock: Path, tmp_path: Path) -> None:
    base(stock, "t5").save_pretrained(tmp_path / "base")
    model = adapted(base(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    for route in ("AutoPeftModel", "AutoModel", "PeftModel on a stock base"):
        found = ROUTES[route](tmp_path / "adapter", tmp_path / "base")
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)
    stock_base = unpatch_model(base(tmp_path / "base"))
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(stock_base, tmp_path / "adapter")), logits(model), rtol=0, atol=0
    )


@pytest.mark.parametrize("scheme", [None, "t5"])
def test_a_model_is_not_saved_beside_an_adapter_that_would_be_added_to_it(
    scheme: str | None, stock: Path, tmp_path: Path
) -> None:
    adapted(base(stock, scheme)).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UnsupportedError, match="would add this adapter"):
        base(stock, "alibi").save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
