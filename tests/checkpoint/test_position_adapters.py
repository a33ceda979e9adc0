"""A scheme and its trained parameters in kilobytes, only for the base that they were trained on."""

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
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, QuantoConfig

from hf_posenc import (
    CheckpointError,
    PositionEncodingError,
    UnsupportedError,
    load_position_adapter,
    patch_model,
    save_position_adapter,
    unpatch_model,
)
from hf_posenc.patching.anatomy.weights import difference, fingerprint
from hf_posenc.recipes import add_lora
from tests.checkpoint.checkpoint_cases import (
    LORA,
    adapted,
    as_format_1,
    assert_same,
    base,
    bert,
    edit_json,
    llama,
    made,
    outputs,
    randomize,
    t5,
)

FILE = "position_encoding.json"


@pytest.fixture(scope="module", params=["alibi", "t5", "learned"])
def saved(request: pytest.FixtureRequest, stock: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = base(stock, request.param)
    save_position_adapter(model, folder)
    return folder, model


class TestLoading:
    def test_parameters_come_back_bit_for_bit_in_small_files(self, saved: tuple[Path, Any], stock: Path) -> None:
        folder, model = saved
        found = base(stock)
        assert load_position_adapter(found, folder) is found
        assert found.position_encoding.config == model.position_encoding.config
        for pair in zip(found.position_encoding.parameters(), model.position_encoding.parameters(), strict=True):
            assert torch.equal(*pair)
        assert_same(found, model)
        assert_same(load_position_adapter(found, folder), model)
        assert_same(unpatch_model(found), base(stock))
        parameters = sum(parameter.numel() * 4 for parameter in model.position_encoding.parameters())
        assert sum(path.stat().st_size for path in folder.iterdir()) < 16_000 + parameters
        assert (folder / "position_encoding.safetensors").exists() == bool(parameters)

    def test_the_base_may_have_another_dtype_and_added_tokens(
        self, saved: tuple[Path, Any], stock: Path, tmp_path: Path
    ) -> None:
        save_position_adapter(patch_model(base(stock, dtype=torch.bfloat16), "t5"), tmp_path)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            load_position_adapter(base(stock, dtype=dtype), tmp_path)
            found = base(stock, dtype=dtype)
            found.resize_token_embeddings(70)
            load_position_adapter(found, saved[0])
            assert found.position_encoding.config == saved[1].position_encoding.config

    def test_a_quantised_base(self, saved: tuple[Path, Any], stock: Path, tmp_path: Path) -> None:
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        quantized = base(stock, quantization_config=QuantoConfig(weights="int8"))
        found = load_position_adapter(quantized, saved[0])
        assert found.position_encoding.config == saved[1].position_encoding.config
        if found.position_encoding.config.name == "alibi":
            assert_same(found, patch_model(base(stock, quantization_config=QuantoConfig(weights="int8")), "alibi"))
        # And from a quantised base onto the whole one.
        save_position_adapter(found, tmp_path)
        assert_same(load_position_adapter(base(stock), tmp_path), saved[1])

    def test_an_offloaded_base(self, saved: tuple[Path, Any], stock: Path, tmp_path: Path) -> None:
        where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        where |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
        found = base(stock, device_map=where, offload_folder=tmp_path)
        assert found.model.layers[1].mlp.up_proj.weight.device.type == "meta"
        assert_same(load_position_adapter(found, saved[0]), saved[1])

    @pytest.mark.parametrize("build", [bert, t5])
    def test_other_families(self, build: Callable[[], Any], tmp_path: Path) -> None:
        model = made(build=build)
        stock = copy.deepcopy(model)
        randomize(patch_model(model, "t5").position_encoding)
        save_position_adapter(model, tmp_path)
        assert_same(load_position_adapter(stock, tmp_path), model)

    def test_an_adapter_on_top_is_named(self, stock: Path, tmp_path: Path) -> None:
        model = adapted(base(stock, "t5"))
        with pytest.raises(ValueError, match="adapter="):
            save_position_adapter(model, tmp_path)
        assert not any(tmp_path.iterdir())
        model.save_pretrained(tmp_path / "lora")
        save_position_adapter(model, tmp_path / "scheme", adapter="../lora")
        for folder in ("scheme", "lora"):
            found = load_position_adapter(base(stock), tmp_path / folder)
            assert isinstance(found, PeftModel)
            assert_same(found, model)


def trained(model: Any) -> Any:
    """A few steps of whatever requires a gradient."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    ids = torch.arange(3, 17)[None]
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
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
        with pytest.raises(CheckpointError, match="different weights"):
            load_position_adapter(base(stock), tmp_path / "scheme")
        # This is only a warning, because these weights may be a base that is saved elsewhere.
        unpatch_model(model).save_pretrained(tmp_path / "new base")
        load_position_adapter(base(tmp_path / "new base"), tmp_path / "scheme")

    def test_a_scheme_that_was_trained_alone_is_saved_without_a_word(
        self, stock: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        model = trained(scheme_alone(base(stock, "t5")))
        twin, extra = base(stock, "t5"), base(stock, "alibi")
        twin.load_state_dict(model.state_dict())  # as Trainer does when it resumes
        extra.resize_token_embeddings(70)
        half = copy.deepcopy(model).to(torch.bfloat16)
        for changed in (model, twin, copy.deepcopy(model), half, extra, base(stock, "none")):
            save_position_adapter(changed, tmp_path)
            load_position_adapter(base(stock), tmp_path)
        save_position_adapter(trained(add_lora(base(stock, "t5"), LoraConfig(**LORA))), tmp_path, adapter="elsewhere")
        assert not [str(warning.message) for warning in recwarn if "not those" in str(warning.message)]


def _one_layer_tuned(stock: Path) -> Any:
    model = base(stock)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    return model


def _without_memory() -> Any:
    with torch.device("meta"):
        return llama()


TUNED = r"\d+ of \d+ tensors differ"
#: Models that a saved scheme does not belong on, and what the error says.
STRANGERS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "another checkpoint of the same shape": (lambda _: made(seed=1), CheckpointError, "trained on different weights"),
    "a sibling": (lambda stock: trained(base(stock)), CheckpointError, TUNED),
    "a sibling, bfloat16": (lambda stock: trained(base(stock)).bfloat16(), CheckpointError, TUNED),
    "a sibling, float16": (lambda stock: trained(base(stock)).half(), CheckpointError, TUNED),
    "one layer tuned": (_one_layer_tuned, CheckpointError, r"layers\.1\.mlp\.down_proj\.weight"),
    "another shape": (lambda _: llama(intermediate_size=40), CheckpointError, r"has the shape \["),
    "another architecture": (lambda _: bert(), CheckpointError, "trained on a 'llama' model, but this is a 'bert'"),
    "another scheme": (lambda stock: base(stock, "kerple"), UnsupportedError, "Load it on the stock model"),
    "no weights": (lambda _: _without_memory(), CheckpointError, "none of the .* can be compared"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_model_that_it_was_not_trained_on_is_refused(saved: tuple[Path, Any], stock: Path, stranger: str) -> None:
    build, error, message = STRANGERS[stranger]
    model = build(stock)
    scheme = getattr(model, "position_encoding", None)
    with pytest.raises(error, match=message):
        load_position_adapter(model, saved[0])
    assert getattr(model, "position_encoding", None) is scheme


def test_what_cannot_be_saved_or_is_not_there(stock: Path, tmp_path: Path) -> None:
    with pytest.raises(PositionEncodingError, match="no scheme to save"):
        save_position_adapter(base(stock), tmp_path)
    with pytest.raises(CheckpointError, match=r"has no position_encoding\.json"):
        load_position_adapter(base(stock), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="is not a folder"):
        save_position_adapter(base(stock, "alibi"), tmp_path / "file")


NORM = {"shape": [32], "values": "!"}
#: Changes of the JSON file, below the keys in front, and what the error says where there is no hash of the content.
DAMAGES: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"format": 0}, "format 0"),
    ((), {"format": True}, "format True"),
    ((), {"format": 3}, "Update hf_posenc"),
    ((), {"scheme": None}, "'scheme'"),
    ((), {"scheme": {"scheme": "albi"}}, "cannot be built"),
    (("scheme",), {"num_buckets": 16}, "shape"),
    (("scheme",), {"max_distance": 3}, "max_distance"),
    ((), {"fingerprint": []}, "'fingerprint'"),
    ((), {"fingerprint": {}}, "can be compared"),
    ((), {"fingerprint": {"norm.weight": {"shape": [0]}}}, "fingerprint"),
    ((), {"fingerprint": {"norm.weight": NORM}}, r"norm\.weight"),
    ((), {"parameters": {"sha256": "0" * 64}}, "not the file"),
    ((), {"parameters": None}, "shape"),
    *(((), {"length": length}, "length") for length in ("long", 0, -1, True, 1.5, 2**31)),
    ((), {"adapter": 7}, "'adapter'"),
    ((), {"adapter": "x"}, "names the PEFT adapter 'x'"),
    *(((), {"adapter": name}, "names the PEFT adapter") for name in ("", "a" * 10_000, "\0")),
]


def test_a_damaged_file_is_named(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise a hub that cannot be reached is asked again and again.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    save_position_adapter(base(stock, "t5"), tmp_path)
    path, model = tmp_path / FILE, base(stock)
    hashed = path.read_text()
    path.write_text(json.dumps([hashed]))
    with pytest.raises(CheckpointError, match="format None"):
        load_position_adapter(model, tmp_path)
    path.write_text(hashed)
    older = as_format_1(tmp_path).read_text()
    for where, change, message in DAMAGES:
        for text, expected in ((hashed, f"was edited|{message}"), (older, message)):
            path.write_text(text)
            edit_json(path, *where, **change)
            with pytest.raises(CheckpointError, match=expected):
                load_position_adapter(model, tmp_path)
            assert not hasattr(model, "position_encoding"), change


@pytest.mark.parametrize("scheme", ["t5", [{"scheme": "rope", "theta": 500.0}, "alibi"]])
def test_a_scheme_that_was_edited_is_refused(scheme: Any, stock: Path, tmp_path: Path) -> None:
    model = patch_model(base(stock), scheme)
    save_position_adapter(model, tmp_path)
    path = tmp_path / FILE
    written, target = path.read_text(), base(stock)
    for change in every_edit(json.loads(written)):
        path.write_text(json.dumps(change))
        with pytest.raises(CheckpointError):
            load_position_adapter(target, tmp_path)
    # The order of keys and spaces is no content.
    path.write_text(json.dumps(dict(reversed(json.loads(written).items()))))
    for _ in range(2):
        assert_same(load_position_adapter(base(stock), tmp_path), model)
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


def test_a_killed_save_leaves_the_old_files_and_others_are_refused(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = base(stock, "t5"), base(stock, "kerple")
    save_position_adapter(old, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_position_adapter(new, tmp_path)
    path = tmp_path / "position_encoding.safetensors"
    assert sorted(tmp_path.iterdir()) == [tmp_path / FILE, path]
    assert_same(load_position_adapter(base(stock), tmp_path), old)
    # New parameters beside the old JSON file.
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match="saving was interrupted"):
        load_position_adapter(base(stock), tmp_path)


class TestFingerprint:
    def test_a_change_in_any_recorded_tensor_shows(self) -> None:
        model = made()
        saved = fingerprint(model)
        assert difference(saved, model) is None
        for name, parameter in model.model.named_parameters():
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(1e-3)
                assert name in str(difference(saved, model))
                parameter.copy_(before)

    def test_frozen_native_weights_belong_to_the_base_and_a_head_that_stock_code_makes_up_does_not(
        self, tmp_path: Path
    ) -> None:
        model = made(build=bert)
        model.save_pretrained(tmp_path)
        saved = fingerprint(model)
        for other in (AutoModel, AutoModelForSequenceClassification):
            assert difference(saved, other.from_pretrained(tmp_path)) is None
        assert "embeddings.position_embeddings.weight" in fingerprint(patch_model(model, "alibi"))
        assert outputs(model).isfinite().all()
