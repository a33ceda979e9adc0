"""A scheme and its trained parameters in kilobytes, on the base they were trained on and on no other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, QuantoConfig

import hf_posenc
from hf_posenc import (
    CheckpointError,
    PositionEncodingError,
    UnsupportedError,
    load_position_adapter,
    patch_model,
    save_position_adapter,
    unpatch_model,
)
from hf_posenc.patching.anatomy.fingerprint import difference, fingerprint
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import as_format_1, bert, llama, randomize, t5
from tests.checkpoint.stock_folder import write_stock_llama
from tests.checkpoint.test_adapters import IDS, LORA, adapted, base, logits


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stock_llama(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module", params=["alibi", "t5", "learned"])
def saved(request: pytest.FixtureRequest, stock: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = base(stock, request.param)
    save_position_adapter(model, folder)
    return folder, model


class TestLoading:
    def test_parameters_come_back_bit_for_bit(self, saved: tuple[Path, Any], stock: Path) -> None:
        folder, model = saved
        found = base(stock)
        assert load_position_adapter(found, folder) is found
        assert found.position_encoding.config == model.position_encoding.config
        expected = dict(model.position_encoding.named_parameters())
        for name, parameter in found.position_encoding.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)

    def test_the_files_are_small(self, saved: tuple[Path, Any]) -> None:
        folder, model = saved
        parameters = sum(parameter.numel() * 4 for parameter in model.position_encoding.parameters())
        assert sum(path.stat().st_size for path in folder.iterdir()) < 16_000 + parameters
        assert (folder / "position_encoding.safetensors").exists() == bool(parameters)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_the_base_may_have_another_dtype(self, saved: tuple[Path, Any], stock: Path, dtype: torch.dtype) -> None:
        found = load_position_adapter(base(stock, dtype=dtype), saved[0])
        assert found.position_encoding.config == saved[1].position_encoding.config

    def test_one_saved_in_half_precision_fits_the_others(self, stock: Path, tmp_path: Path) -> None:
        model = patch_model(base(stock, dtype=torch.bfloat16), "t5")
        save_position_adapter(model, tmp_path)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            load_position_adapter(base(stock, dtype=dtype), tmp_path)

    def test_a_quantised_base(self, saved: tuple[Path, Any], stock: Path, tmp_path: Path) -> None:
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        quantized = base(stock, quantization_config=QuantoConfig(weights="int8"))
        found = load_position_adapter(quantized, saved[0])
        expected = patch_model(base(stock, quantization_config=QuantoConfig(weights="int8")), "alibi")
        assert found.position_encoding.config == saved[1].position_encoding.config
        if found.position_encoding.config.name == "alibi":
            torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=0)
        # And from a quantised base onto the whole one.
        save_position_adapter(found, tmp_path)
        whole = load_position_adapter(base(stock), tmp_path)
        torch.testing.assert_close(logits(whole), logits(saved[1]), rtol=0, atol=0)

    def test_an_offloaded_base(self, saved: tuple[Path, Any], stock: Path, tmp_path: Path) -> None:
        where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        where |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
        found = base(stock, device_map=where, offload_folder=tmp_path)
        assert found.model.layers[1].mlp.up_proj.weight.device.type == "meta"
        load_position_adapter(found, saved[0])
        torch.testing.assert_close(logits(found), logits(saved[1]), rtol=0, atol=0)

    def test_twice_is_once(self, saved: tuple[Path, Any], stock: Path) -> None:
        found = load_position_adapter(base(stock), saved[0])
        torch.testing.assert_close(logits(load_position_adapter(found, saved[0])), logits(saved[1]), rtol=0, atol=0)
        unpatch_model(found)
        torch.testing.assert_close(logits(found), logits(base(stock)), rtol=0, atol=0)

    def test_added_tokens_do_not_make_it_another_base(self, saved: tuple[Path, Any], stock: Path) -> None:
        found = base(stock)
        found.resize_token_embeddings(70)
        load_position_adapter(found, saved[0])

    @pytest.mark.parametrize("build", [bert, t5], ids=["bert", "t5"])
    def test_other_families(self, build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
        randomize(build()).save_pretrained(tmp_path / "stock")
        kind = type(build())
        model = randomize_scheme(patch_model(kind.from_pretrained(tmp_path / "stock"), "t5"))
        save_position_adapter(model, tmp_path / "scheme")
        found = load_position_adapter(kind.from_pretrained(tmp_path / "stock"), tmp_path / "scheme")
        for pair in zip(found.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=0)


def randomize_scheme(model: Any) -> Any:
    randomize(model.position_encoding)
    return model


class TestWithPeft:
    def test_the_adapter_on_top_is_named(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"))
        model.save_pretrained(tmp_path / "lora")
        save_position_adapter(model, tmp_path / "scheme", adapter="../lora")
        found = load_position_adapter(base(stock), tmp_path / "scheme")
        assert isinstance(found, PeftModel)
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)

    def test_one_that_is_not_named_is_asked_for(self, stock: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="adapter="):
            save_position_adapter(adapted(base(stock, "alibi")), tmp_path)
        assert not any(tmp_path.iterdir())

    def test_one_that_cannot_be_found_leaves_the_base_stock(
        self, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Otherwise a hub that cannot be reached is asked again and again.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        save_position_adapter(base(stock, "alibi"), tmp_path, adapter="gone")
        model = base(stock)
        with pytest.raises(CheckpointError, match="adapter_config"):
            load_position_adapter(model, tmp_path)
        assert not hasattr(model, "position_encoding")

    def test_the_folder_of_an_adapter_will_do(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"), LoraConfig(**LORA))
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(logits(load_position_adapter(base(stock), tmp_path)), logits(model), rtol=0, atol=0)


def trained(model: Any, steps: int = 2) -> Any:
    """A few steps of whatever requires a gradient."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def scheme_alone(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("position_encoding" in name)
    return model


class TestTrainedBase:
    @pytest.mark.parametrize("kind", ["patched in memory", "patched folder", "patched twice", "one layer", "copy"])
    def test_saving_warns_that_the_files_will_not_fit_the_original_base(
        self, stock: Path, tmp_path: Path, kind: str
    ) -> None:
        model = base(stock, "t5")
        if kind == "patched folder":
            model.save_pretrained(tmp_path / "patched")
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
        if kind == "one layer":
            scheme_alone(model).model.layers[1].mlp.down_proj.requires_grad_(True)
        trained(model)
        if kind == "patched twice":
            patch_model(model, "alibi")
        if kind == "copy":
            model = copy.deepcopy(model)
        with pytest.warns(UserWarning, match=r"weights .* not those .*save_pretrained.*freeze"):
            save_position_adapter(model, tmp_path / "scheme")
        with pytest.raises(CheckpointError, match="other weights"):
            load_position_adapter(base(stock), tmp_path / "scheme")
        # The warning leaves the choice: these weights may be a base that is saved elsewhere.
        unpatch_model(model).save_pretrained(tmp_path / "new base")
        load_position_adapter(base(tmp_path / "new base"), tmp_path / "scheme")

    def test_a_scheme_that_was_trained_alone_is_saved_without_a_word(
        self, stock: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        model = trained(scheme_alone(base(stock, "t5")))
        twin = base(stock, "t5")
        twin.load_state_dict(model.state_dict())  # as Trainer does when it resumes
        extra = base(stock, "alibi")
        extra.resize_token_embeddings(70)
        changed = (
            model,
            twin,
            copy.deepcopy(model),
            copy.deepcopy(model).to(torch.bfloat16),
            extra,
            base(stock, "none"),
        )
        for one in changed:
            save_position_adapter(one, tmp_path)
            load_position_adapter(base(stock), tmp_path)
        lora = trained(add_lora(base(stock, "t5"), LoraConfig(**LORA)))
        save_position_adapter(lora, tmp_path, adapter="elsewhere")
        assert not [str(one.message) for one in recwarn if "not those" in str(one.message)]

    def test_what_was_trained_elsewhere_is_refused_when_the_files_are_loaded(self, stock: Path, tmp_path: Path) -> None:
        """Nothing shows that another process trained these weights."""
        trained(base(stock)).save_pretrained(tmp_path / "trained")
        save_position_adapter(patch_model(base(tmp_path / "trained"), "alibi"), tmp_path / "scheme")
        with pytest.raises(CheckpointError, match="other weights"):
            load_position_adapter(base(stock), tmp_path / "scheme")


class TestRefusals:
    def refused(self, model: Any, folder: Path, error: type[Exception], message: str) -> None:
        scheme = getattr(model, "position_encoding", None)
        with pytest.raises(error, match=message):
            load_position_adapter(model, folder)
        assert getattr(model, "position_encoding", None) is scheme

    def test_another_checkpoint_of_the_same_shape(self, saved: tuple[Path, Any]) -> None:
        self.refused(randomize(randomize(llama())), saved[0], CheckpointError, "trained on other weights")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_a_sibling_fine_tuned_for_a_few_steps(
        self, saved: tuple[Path, Any], stock: Path, dtype: torch.dtype
    ) -> None:
        sibling = base(stock)
        optimizer = torch.optim.AdamW(sibling.parameters(), lr=1e-3)
        for _ in range(3):
            ids = torch.arange(3, 30)[None]
            sibling(ids, labels=ids).loss.backward()
            optimizer.step()
        self.refused(sibling.to(dtype), saved[0], CheckpointError, r"\d+ of \d+ tensors differ")

    def test_another_shape(self, saved: tuple[Path, Any], tmp_path: Path) -> None:
        config = llama().config
        config.intermediate_size = 40
        model = AutoModelForCausalLM.from_config(config)
        self.refused(model, saved[0], CheckpointError, r"has the shape \[")

    def test_another_architecture(self, saved: tuple[Path, Any]) -> None:
        self.refused(bert(), saved[0], CheckpointError, "trained on a 'llama' model, but this is a 'bert'")

    def test_another_scheme_in_the_model(self, saved: tuple[Path, Any], stock: Path) -> None:
        self.refused(base(stock, "kerple"), saved[0], UnsupportedError, "Load it on the stock model")

    def test_weights_that_cannot_be_looked_at(self, saved: tuple[Path, Any]) -> None:
        with torch.device("meta"):
            model = llama()
        self.refused(model, saved[0], CheckpointError, "none of the .* can be compared")

    def test_a_stock_model_has_nothing_to_save(self, stock: Path, tmp_path: Path) -> None:
        with pytest.raises(PositionEncodingError, match="no scheme to save"):
            save_position_adapter(base(stock), tmp_path)

    def test_a_file_in_place_of_the_folder(self, stock: Path, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.touch()
        with pytest.raises(FileExistsError, match="is a file"):
            save_position_adapter(base(stock, "alibi"), path)

    def test_an_empty_folder(self, stock: Path, tmp_path: Path) -> None:
        self.refused(base(stock), tmp_path, CheckpointError, r"has no position_encoding\.json")


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no object": (lambda entry: [entry], "format None"),
    "format 0": (lambda entry: entry | {"format": 0}, "format 0"),
    "format true": (lambda entry: entry | {"format": True}, "format True"),
    "a newer format": (lambda entry: entry | {"format": 3}, "Update hf_posenc"),
    "no scheme": (lambda entry: entry | {"scheme": None}, "'scheme'"),
    "an unknown scheme": (lambda entry: entry | {"scheme": {"scheme": "albi"}}, "cannot be built"),
    "another option": (lambda entry: entry | {"scheme": entry["scheme"] | {"num_buckets": 16}}, "shape"),
    "no fingerprint": (lambda entry: entry | {"fingerprint": []}, "'fingerprint'"),
    "an empty fingerprint": (lambda entry: entry | {"fingerprint": {}}, "can be compared"),
    "a fingerprint of nonsense": (
        lambda entry: entry | {"fingerprint": {"norm.weight": {"shape": [0]}}},
        "fingerprint",
    ),
    "values of nonsense": (
        lambda entry: entry | {"fingerprint": {"norm.weight": {"shape": [32], "values": "!"}}},
        r"norm\.weight",
    ),
    "a hash of another file": (lambda entry: entry | {"parameters": {"sha256": "0" * 64}}, "not the file"),
    "no parameters": (lambda entry: entry | {"parameters": None}, "shape"),
    "an adapter of the wrong kind": (lambda entry: entry | {"adapter": 7}, "'adapter'"),
    "an adapter that is not there": (lambda entry: entry | {"adapter": "x"}, "names the PEFT adapter 'x'"),
    "an adapter here": (lambda entry: entry | {"adapter": ""}, "names the PEFT adapter"),
    "an adapter with a long name": (lambda entry: entry | {"adapter": "a" * 10_000}, "names the PEFT adapter"),
    "an adapter with a name of nothing": (lambda entry: entry | {"adapter": "\0"}, "names the PEFT adapter"),
    "a short distance": (lambda entry: entry | {"scheme": entry["scheme"] | {"max_distance": 3}}, "max_distance"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage: str, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    save_position_adapter(base(stock, "t5"), tmp_path)
    change, message = DAMAGES[damage]
    path = tmp_path / "position_encoding.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    model = base(stock)
    with pytest.raises(CheckpointError, match=f"was edited|{message}"):
        load_position_adapter(model, tmp_path)
    save_position_adapter(base(stock, "t5"), tmp_path)
    path.write_text(json.dumps(change(json.loads(as_format_1(tmp_path).read_text()))))
    with pytest.raises(CheckpointError, match=message):
        load_position_adapter(model, tmp_path)
    assert not hasattr(model, "position_encoding")


@pytest.mark.parametrize("scheme", ["alibi", "rope", "t5", [{"scheme": "rope", "theta": 500.0}, "alibi"]])
def test_a_scheme_that_was_edited_is_refused(scheme: Any, stock: Path, tmp_path: Path) -> None:
    model = patch_model(base(stock), scheme)
    save_position_adapter(model, tmp_path)
    path = tmp_path / "position_encoding.json"
    written = path.read_text()
    for change in every_edit(json.loads(written)):
        path.write_text(json.dumps(change))
        with pytest.raises(CheckpointError):
            load_position_adapter(base(stock), tmp_path)
    # The order of keys and spaces is no content.
    path.write_text(json.dumps(dict(reversed(json.loads(written).items()))))
    for loaded in (base(stock), base(stock)):
        torch.testing.assert_close(logits(load_position_adapter(loaded, tmp_path)), logits(model), rtol=0, atol=0)
        as_format_1(tmp_path)


def every_edit(entry: Any) -> Iterator[Any]:
    """The entry with each of its values changed, or left out."""
    if not isinstance(entry, dict | list):
        yield not entry if isinstance(entry, bool) else entry + 1 if isinstance(entry, int | float) else f"{entry}x"
        return
    for key, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
        if key == "fingerprint":
            continue  # It has a test of its own, and hundreds of values.
        for change in every_edit(value):
            edited = copy.copy(entry)
            edited[key] = change
            yield edited
        edited = copy.copy(entry)
        del edited[key]
        yield edited


def test_parameters_of_another_save_are_refused(stock: Path, tmp_path: Path) -> None:
    """What a killed save leaves: the new parameters beside the old JSON file."""
    save_position_adapter(base(stock, "t5"), tmp_path)
    path = tmp_path / "position_encoding.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match="saving was interrupted"):
        load_position_adapter(base(stock), tmp_path)


def test_a_killed_save_leaves_the_old_files(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = base(stock, "t5")
    save_position_adapter(old, tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_position_adapter(base(stock, "kerple"), tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "position_encoding.json",
        "position_encoding.safetensors",
    ]
    torch.testing.assert_close(logits(load_position_adapter(base(stock), tmp_path)), logits(old), rtol=0, atol=0)


class TestFingerprint:
    def test_a_change_in_any_recorded_tensor_shows(self) -> None:
        model = randomize(llama())
        saved = fingerprint(model)
        assert difference(saved, model) is None
        for name, parameter in model.model.named_parameters():
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(1e-3)
            assert name in str(difference(saved, model))
            with torch.no_grad():
                parameter.copy_(before)

    def test_frozen_native_weights_belong_to_the_base(self, tmp_path: Path) -> None:
        model = patch_model(bert(), "alibi")
        assert "embeddings.position_embeddings.weight" in fingerprint(model)

    def test_a_head_or_pooler_that_stock_code_makes_up_does_not(self, tmp_path: Path) -> None:
        model = AutoModelForMaskedLM.from_config(bert().config)
        model.save_pretrained(tmp_path)
        saved = fingerprint(model)
        from transformers import AutoModel, AutoModelForSequenceClassification

        for other in (AutoModel, AutoModelForSequenceClassification):
            assert difference(saved, other.from_pretrained(tmp_path)) is None


def test_the_public_names_are_listed() -> None:
    assert {"load_position_adapter", "save_position_adapter"} <= set(dir(hf_posenc))
