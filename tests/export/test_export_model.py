"""`export_model` with every kind of bad input: it refuses with the reason, and no partial output looks complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from transformers import LlamaForCausalLM

import hf_posenc
from hf_posenc import UnknownNameError, UnsupportedError
from hf_posenc.errors import UsageError
from hf_posenc.export.records import MANIFEST
from tests.checkpoint.checkpoint_cases import llama, outputs, randomize
from tests.checkpoint.test_interrupted_save import killed_at, moments
from tests.integrations.subject import tokenizer
from tests.models import tiny


def patched(theta: float = 500.0) -> Any:
    return randomize(hf_posenc.patch_model(llama(), "rope", theta=theta))


@pytest.fixture
def model() -> Any:
    return patched()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


#: A file that is there, where an export is written, its options, and what the error says.
IN_USE: list[tuple[str, str, dict[str, Any], str]] = [
    ("out", "out", {"overwrite": True}, "is a file"),
    ("out/notes.txt", "out", {}, "overwrite=True"),
    ("out/README.md/mine", "out", {"overwrite": True}, "is a folder"),
    ("out/adapter_config.json", "out", {"overwrite": True}, "would add these adapters"),
    ("out/pytorch_model.bin", "out", {"overwrite": True, "variant": "fp16"}, "unless the variant is named"),
    ("out/model.safetensors", "out", {"overwrite": True, "variant": "fp16"}, "unless the variant is named"),
    ("notes.txt", "", {"overwrite": True}, r"or '\.' for the current one"),
]


@pytest.mark.parametrize(("name", "folder", "options", "message"), IN_USE, ids=str)
def test_what_is_in_use_is_kept(
    model: Any, tmp_path: Path, name: str, folder: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises((FileExistsError, FileNotFoundError), match=message):
        hf_posenc.export_model(model, folder and tmp_path / folder, **options)
    assert contents(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("name", ["notes.txt", "pytorch_model.bin", "model.safetensors"])
def test_an_export_may_be_written_beside_other_files(model: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    report = hf_posenc.export_model(model, tmp_path, overwrite=True)
    assert ((tmp_path / name).read_bytes() == b"mine") == (name not in report.files)
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path)), outputs(model))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(model: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        hf_posenc.export_model(model, tmp_path / "out")


def test_links_are_followed_and_stay(model: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for link, folder in (("link", "real"), ("dangling", "new")):
        hf_posenc.export_model(model, tmp_path / link)
        assert (tmp_path / link).is_symlink()
        assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path / folder)), outputs(model))


def test_a_manifest_that_was_edited_removes_nothing_else(model: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept.txt").write_text("mine")
    place = tmp_path / "out"
    hf_posenc.export_model(model, place)
    (place / "runs").mkdir()
    (place / "runs" / "log").write_text("mine")
    (place / "old.bin").write_text("of the export")
    (place / "elsewhere").symlink_to(tmp_path / "elsewhere")
    names = ["../outside.txt", str(outside), "elsewhere/kept.txt", "runs", "", ".", "..", "\0", 3, None, "old.bin"]
    for found in ({"files": names}, {"files": "all"}, ["files"], {}):
        (place / MANIFEST).write_text(json.dumps(found))
        hf_posenc.export_model(model, place, overwrite=True)
    (place / MANIFEST).write_text("[" * 100_000)
    hf_posenc.export_model(model, place, overwrite=True)
    for path in (outside, tmp_path / "elsewhere" / "kept.txt", place / "runs" / "log"):
        assert path.read_text() == "mine"
    assert not (place / "old.bin").exists()


def test_an_export_replaces_the_files_of_the_one_before(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    hf_posenc.export_model(patched(), tmp_path, tokenizer=words, max_shard_size="20KB")
    shards = set(contents(tmp_path))
    for given in (words, None):
        report = hf_posenc.export_model(patched(700.0), tmp_path, overwrite=True, tokenizer=given)
        assert set(contents(tmp_path)) == set(report.files)
        assert ("additional_chat_templates/tools.jinja" in report.files) == (given is not None)
        assert len(report.files) < len(shards)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends child processes by signal")
@pytest.mark.parametrize("before", [None, 500.0])
def test_a_killed_export_leaves_the_old_one_or_the_new_one_or_no_model(before: float | None, tmp_path: Path) -> None:
    new, pristine, place = patched(700.0), tmp_path / "pristine", tmp_path / "place"
    weights = {}
    for theta, model in {700.0: new, before: patched(500.0)}.items():
        shutil.rmtree(pristine, ignore_errors=True)
        hf_posenc.export_model(model, pristine)
        weights[theta] = (pristine / "model.safetensors").read_bytes()
    if before is None:
        shutil.rmtree(pristine)
        pristine.mkdir()
    (pristine / "tokenizer.json").write_text("tokens")
    seen = set()
    for _ in moments(place, pristine, lambda: hf_posenc.export_model(new, place / "model", overwrite=True)):
        assert (place / "model" / "tokenizer.json").read_text() == "tokens"
        config, file = place / "model" / "config.json", place / "model" / "model.safetensors"
        # Read as by a program that does not know this package.
        found = json.loads(config.read_text()) if config.exists() else {}
        if "rope_parameters" in found and (before is None or file.exists()):
            theta = found["rope_parameters"]["rope_theta"]
            assert file.read_bytes() == weights[theta]
            seen.add(theta)
        else:
            # A config that stands in the folder while files are moved names this package, and nothing loads it.
            assert not file.exists() or found.get("model_type", "hf_posenc").startswith("hf_posenc"), found
            seen.add(None)
    assert seen >= {before, 700.0}


def test_an_interrupt_leaves_the_old_export_or_completes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, place, found = patched(700.0), tmp_path / "place", []
    hf_posenc.export_model(patched(), tmp_path / "old" / "model", max_shard_size="20KB")
    hf_posenc.export_model(new, tmp_path / "new" / "model")
    old, expected = contents(tmp_path / "old"), contents(tmp_path / "new")
    calls = moment = 0

    def interrupted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    while calls >= moment:
        calls, moment = 0, moment + 1
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path / "old", place)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("replace", "rename", "unlink"):
                patch.setattr(os, name, interrupted(getattr(os, name)))
            hf_posenc.export_model(new, place / "model", overwrite=True)
        found.append(contents(place))
        assert found[-1] in (old, expected)
    assert found[0] == old
    assert moment > len(old)


def test_a_refusal_leaves_no_missing_parent_behind(tmp_path: Path) -> None:
    model = hf_posenc.patch_model(llama(), "alibi")
    with pytest.raises(UnsupportedError):
        hf_posenc.export_model(model, tmp_path / "runs" / "new" / "out")
    assert list(tmp_path.iterdir()) == []
    hf_posenc.export_model(patched(), tmp_path / "runs" / "new" / "out")


def test_an_empty_folder_is_empty_after_an_export_that_was_killed(model: Any, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    assert killed_at(4, place, lambda: hf_posenc.export_model(model, place))
    assert [path.name[:11] for path in place.iterdir()] == [".hf_posenc-"]
    hf_posenc.export_model(model, place)
    assert (place / "config.json").exists()
    assert not list(place.glob(".*"))


def test_a_full_disk_and_a_tokenizer_that_raises_leave_nothing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def save_pretrained(self, folder: Any) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")
            raise RuntimeError("cannot be saved")

    with pytest.raises(RuntimeError, match="cannot be saved"):
        hf_posenc.export_model(model, tmp_path / "out", tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match=r"AutoTokenizer\.from_pretrained"):
        hf_posenc.export_model(model, tmp_path / "out", tokenizer="gpt2")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hf_posenc.export_model(model, tmp_path / "kept")
    before = contents(tmp_path)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    for folder in ("out", "kept"):
        with pytest.raises(OSError, match="No space"):
            hf_posenc.export_model(patched(700.0), tmp_path / folder, overwrite=True)
    assert contents(tmp_path) == before


def test_unknown_names_are_refused_before_anything_is_written(model: Any, tmp_path: Path) -> None:
    for call, error, message in (
        ({"to": "gguff"}, UnknownNameError, "Did you mean 'gguf'"),
        ({"shard_size": 3}, UnknownNameError, "max_shard_size"),
        ({"push_to_hub": "me/x", "hub_options": {"privat": True}}, UnknownNameError, "private"),
        ({"hub_options": {"private": True}}, UsageError, "only used with push_to_hub"),
        ({"push_to_hub": "me/x/y"}, HFValidationError, ""),
        ({"push_to_hub": 3}, TypeError, "hub id"),
    ):
        with pytest.raises(error, match=message):
            hf_posenc.export_model(model, tmp_path / "out", **call)
    with pytest.raises(TypeError, match="needs a transformers model"):
        hf_posenc.export_model(torch.nn.Linear(2, 2), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_merged_into_a_copy_when_asked(model: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    with pytest.raises(UnsupportedError, match="merge_adapters=True"):
        hf_posenc.export_model(adapted, tmp_path / "out")
    expected = outputs(adapted.eval())
    hf_posenc.export_model(adapted, tmp_path / "out", merge_adapters=True)
    assert torch.equal(outputs(adapted), expected)
    assert any("lora" in name for name, _ in adapted.named_parameters())
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    # Merging adds the same products in another order.
    assert torch.allclose(outputs(merged), expected, atol=1e-5)
    prompt = peft.get_peft_model(patched(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedError, match=r"add virtual tokens.* Export the model without them: model\.get_base"):
        hf_posenc.export_model(prompt, tmp_path / "prompts", merge_adapters=True)


def test_a_module_around_a_model_is_refused_with_the_place_of_the_model(model: Any, tmp_path: Path) -> None:
    around = torch.nn.ModuleDict({"backbone": model, "head": torch.nn.Linear(4, 4)})
    with pytest.raises(TypeError, match=r"got ModuleDict\. Pass the one inside it: model\.backbone\."):
        hf_posenc.export_model(around, tmp_path / "out")
    hf_posenc.export_model(around.backbone, tmp_path / "out")


@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_a_model_on_the_meta_device_is_refused(model: Any, tmp_path: Path, kind: str) -> None:
    for module in model.modules():
        tensors = getattr(module, f"_{kind}")
        tensors |= {name: tensor.to("meta") for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(UnsupportedError, match=r"on the meta device\).* Load it with device_map=None"):
        hf_posenc.export_model(model, tmp_path / "out")


def test_what_was_edited_after_patching_is_exported_or_refused(tmp_path: Path) -> None:
    edited = patched()
    edited.model.layers[0].self_attn.q_proj.weight.data.mul_(1.5)
    hf_posenc.export_model(edited, tmp_path / "weights")
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path / "weights")), outputs(edited))
    replaced = patched()
    replaced.model.layers[0].self_attn = llama().model.layers[0].self_attn
    with pytest.raises(UnsupportedError):
        hf_posenc.export_model(replaced, tmp_path / "parts")
    other = patched()
    other.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedError):
        hf_posenc.export_model(other, tmp_path / "layers")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_tied_weights_stay_tied_and_modes_stay_as_they_are(tmp_path: Path) -> None:
    tied = llama()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    hf_posenc.patch_model(randomize(tied), "rope", theta=500.0).train()
    tied.model.layers[0].eval()
    modes = [part.training for part in tied.modules()]
    hf_posenc.export_model(tied, tmp_path)
    assert [part.training for part in tied.modules()] == modes
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(outputs(loaded), outputs(tied.eval()))
    tied.config.tie_word_embeddings = False  # As of weights that were tied by hand.
    hf_posenc.export_model(tied, tmp_path / "by hand")
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path / "by hand")), outputs(tied))


def test_tokens_without_embeddings_are_a_warning(model: Any, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"id 95, but the model has 64 embeddings.*model.resize_token_embeddings\(96\)"
    ):
        hf_posenc.export_model(model, tmp_path, tokenizer=tokenizer())


def test_a_part_of_a_model_is_refused_with_the_way_to_its_encoder(tmp_path: Path) -> None:
    part = tiny("T5ForConditionalGeneration").get_encoder()
    with pytest.raises(UnsupportedError, match=r"T5Stack is a part of a model.*T5EncoderModel"):
        hf_posenc.export_model(part, tmp_path / "out", to="onnx")


def test_the_advice_of_a_refusal_leads_nowhere_else(tmp_path: Path) -> None:
    """No target that is named as a way out refuses the same model."""
    model = tiny("T5ForConditionalGeneration")
    hf_posenc.patch_model(model, "alibi")
    with pytest.raises(UnsupportedError) as refused:
        hf_posenc.export_model(model, tmp_path / "out", to="stock")
    named = re.findall(r"export it to '(\w+)'", str(refused.value))
    assert not {"onnx", "executorch"} & set(named)
    for target in named:
        hf_posenc.export_model(model, tmp_path / target, to=target)


def test_files_that_appear_during_an_export_are_kept(model: Any, tmp_path: Path) -> None:
    place = tmp_path / "out"

    class SlowTokenizer:
        def save_pretrained(self, folder: Path) -> None:
            if not place.exists():
                hf_posenc.export_model(patched(700.0), place)  # as another process does

    with pytest.raises(FileExistsError, match="overwrite=True"):
        hf_posenc.export_model(model, place, tokenizer=SlowTokenizer())
    assert hf_posenc.native_scheme(LlamaForCausalLM.from_pretrained(place)).theta == 700.0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_exports_of_one_model_in_two_threads_keep_its_mode(model: Any, tmp_path: Path) -> None:
    both, names = Barrier(2), {"first", "second"}

    class Waiting:
        def save_pretrained(self, folder: Path) -> None:
            with contextlib.suppress(BrokenBarrierError):
                both.wait(0.5)

    model.train()
    with ThreadPoolExecutor() as pool:
        [
            *pool.map(
                lambda name: hf_posenc.export_model(model, tmp_path / name, tokenizer=Waiting()), ("first", "second")
            )
        ]
    assert model.training
    assert both.broken, "they ran at the same time"
    assert {path.name for path in tmp_path.iterdir()} == names
