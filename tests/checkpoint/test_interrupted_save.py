"""A save that is killed, at any of its file operations, leaves the old model or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_posenc
from hf_posenc.checkpoint.atomic_folder import atomic_replacement
from hf_posenc.export.export_model import export_model
from tests.checkpoint.checkpoint_cases import llama, outputs, randomize

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ends child processes by signal")

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
BESIDE = {"tokenizer.json": "tokens", "optimizer.pt": "states", "runs/events": "log"}


def killed_at(operation: int, folder: Path, save: Callable[[], Any]) -> bool:
    """Runs `save` in a child that ends itself before its n-th file operation in a folder; whether it got that far."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in OPERATIONS and any(str(folder) in str(argument) for argument in arguments):
                seen += 1
                if seen == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            save()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save itself failed"
    return os.WIFSIGNALED(status)


def patched(scheme: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return randomize(hf_posenc.patch_model(llama(), scheme))


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "hf_posenc" in path.name]


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), ({"max_shard_size": "20KB"}, {}), ({}, {"max_shard_size": "20KB"}), (None, {"max_shard_size": "20KB"})],
    ids=["whole", "shards-to-whole", "whole-to-shards", "new-folder"],
)
def test_old_or_new_and_nothing_between(tmp_path: Path, before: dict[str, Any] | None, after: dict[str, Any]) -> None:
    old, new = patched("alibi", 0), patched("kerple", 1)
    expected = {model.position_encoding.config.name: outputs(model) for model in (old, new)}
    pristine, place = tmp_path / "pristine", tmp_path / "place"
    if before is not None:
        old.save_pretrained(pristine, **before)
        for name, text in BESIDE.items():
            (pristine / name).parent.mkdir(exist_ok=True)
            (pristine / name).write_text(text)
    met, operation = set(), 1
    while True:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if before is not None:
            shutil.copytree(pristine, place / "model")
        killed = killed_at(operation, place, lambda: new.save_pretrained(place / "model", **after))
        if (place / "model").exists():
            loaded = AutoModelForCausalLM.from_pretrained(place / "model")
            name = loaded.position_encoding.config.name
            assert torch.equal(outputs(loaded), expected[name]), (operation, name)
            met.add(name)
            for path, text in BESIDE.items() if before is not None else ():
                assert (place / "model" / path).read_text() == text
        else:
            assert before is None
            met.add("alibi")
        new.save_pretrained(place / "model", **after)
        assert drafts(place) == []
        if not killed:
            break
        operation += 1
    assert met == {"alibi", "kerple"}
    assert operation > 10
    weights = {path.name for path in (place / "model").glob("*.safetensors*")}
    fresh = tmp_path / "fresh"
    new.save_pretrained(fresh, **after)
    assert weights == {path.name for path in fresh.glob("*.safetensors*")}, "weights of the old model are left"


def test_a_killed_export_leaves_no_model_or_the_whole_one(tmp_path: Path) -> None:
    model = randomize(hf_posenc.patch_model(llama(), "rope", theta=500.0))
    place, operation, seen = tmp_path / "place", 1, set()
    while True:
        shutil.rmtree(place, ignore_errors=True)
        (place / "model").mkdir(parents=True)
        (place / "model" / "tokenizer.json").write_text("tokens")
        killed = killed_at(operation, place, lambda: export_model(model, place / "model", overwrite=True))
        complete = (place / "model" / "config.json").exists()
        if complete:
            loaded = LlamaForCausalLM.from_pretrained(place / "model")
            assert torch.equal(outputs(loaded), outputs(model))
        seen.add(complete)
        assert (place / "model" / "tokenizer.json").read_text() == "tokens"
        if not killed:
            break
        operation += 1
    assert seen == {True, False}


def test_a_save_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = patched("alibi", 0), patched("kerple", 1)
    old.save_pretrained(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(OSError, match="No space"):
        new.save_pretrained(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    with pytest.raises(OSError, match="No space"):
        new.save_pretrained(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_drafts_of_living_processes_and_other_folders_stay(tmp_path: Path) -> None:
    target = tmp_path / "model"
    (target / ".cache").mkdir(parents=True)
    (tmp_path / ".model-backup-1-2").mkdir()
    with atomic_replacement(target) as mine:
        (mine / "config.json").write_text("mine")
        with atomic_replacement(target) as other:
            (other / "config.json").write_text("other")
        assert mine.exists()
    assert (target / "config.json").read_text() == "mine"
    assert {path.name for path in target.iterdir()} == {".cache", "config.json"}
    assert (tmp_path / ".model-backup-1-2").exists()


def test_a_folder_made_meanwhile_keeps_its_files(tmp_path: Path) -> None:
    """Other ranks write into a checkpoint's folder while the first one saves the model."""
    target = tmp_path / "checkpoint-1"
    with atomic_replacement(target) as draft:
        (draft / "model.safetensors").write_text("weights")
        target.mkdir()
        (target / "rng_state_1.pth").write_text("state")
    assert {path.name for path in target.iterdir()} == {"model.safetensors", "rng_state_1.pth"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_arguments_of_save_pretrained(tmp_path: Path) -> None:
    model = patched("alibi", 0)
    model.save_pretrained(tmp_path / "other_rank", is_main_process=False)
    assert list(tmp_path.iterdir()) == []
    model.save_pretrained(tmp_path / "model", variant="fp16")
    model.save_pretrained(str(tmp_path / "model"), True, {k: v * 2 for k, v in model.state_dict().items()}, False)
    assert {path.name for path in (tmp_path / "model").glob("*.safetensors")} == {
        "model.fp16.safetensors",
        "model.safetensors",
    }
    assert torch.equal(
        outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "model", variant="fp16")), outputs(model)
    )
    (tmp_path / "link").symlink_to(tmp_path / "model")
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), outputs(model))
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == model.state_dict().keys()


def test_a_refused_upload_leaves_the_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = patched("alibi", 0), []

    class Repository:
        def create_repo(self, repo_id: str, **options: Any) -> Any:
            names.append(repo_id)
            return type("Url", (), {"repo_id": repo_id})()

    class RefusedError(HfHubHTTPError):
        def __init__(self) -> None:
            Exception.__init__(self, "not allowed")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RefusedError

    monkeypatch.setattr("transformers.modeling_utils.hf_api", Repository)
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", refuse)
    with pytest.raises(HfHubHTTPError, match="not allowed"):
        model.save_pretrained(tmp_path / "named", push_to_hub=True)
    assert names == ["named"]
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "named")), outputs(model))
