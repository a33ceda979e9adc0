"""What lies in a folder as the rest of an earlier save never harms another file, a newer model, or a load."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_posenc
from hf_posenc.checkpoint import atomic_folder
from tests.checkpoint.checkpoint_cases import llama, outputs, randomize


def patched(scheme: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return randomize(hf_posenc.patch_model(llama(), scheme))


def stock(seed: int) -> Any:
    torch.manual_seed(seed)
    return llama().eval()


def gone_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def final_draft(folder: Path, files: dict[str, str], listed: str, host: str | None = None) -> Path:
    draft = folder / f".hf_posenc-{host or socket.gethostname()}-{gone_process()}-00000000"
    draft.mkdir()
    for name, text in files.items():
        (draft / name).write_text(text)
    (draft / "written.json").write_text(listed)
    return draft


def interrupted_save(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saves until everything but `config.json` is in place, as a process that is gone; the draft it leaves."""
    replace = os.replace

    def interrupt(source: Any, target: Any) -> None:
        if Path(target).name == "config.json":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder.os, "getpid", gone_process)
        patch.setattr(atomic_folder.os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(folder)
    (draft,) = folder.glob(".hf_posenc-*")
    return draft


@pytest.mark.parametrize("host", [None, "x"], ids=["this-host", "other-host"])
@pytest.mark.parametrize("outside", ["../train.py", "absolute", "a/../../train.py", "..", ""])
def test_a_draft_changes_nothing_outside_its_folder(tmp_path: Path, outside: str, host: str | None) -> None:
    model = tmp_path / "model"
    llama().config.save_pretrained(model)
    (model / "train.py").write_text("evil")
    mine = tmp_path / "train.py"
    mine.write_text("mine")
    name = str(mine) if outside == "absolute" else outside
    draft = final_draft(model, {"config.json": "{}"}, json.dumps(["config.json", name]), host)
    with pytest.warns(UserWarning, match="not a file directly inside it"):
        assert AutoConfig.from_pretrained(model).model_type == "llama"
    assert mine.read_text() == "mine"
    assert (draft / "config.json").exists()


@pytest.mark.parametrize("link", ["file", "draft", "list"])
def test_a_draft_with_links_is_not_applied(tmp_path: Path, link: str) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    llama().config.save_pretrained(model)
    elsewhere.mkdir()
    (elsewhere / "secret.txt").write_text("secret")
    draft = final_draft(model, {"notes.txt": "notes"}, '["notes.txt"]')
    if link == "draft":
        draft.rename(elsewhere / "draft")
        draft.symlink_to(elsewhere / "draft")
        AutoConfig.from_pretrained(model)
    else:
        linked = draft / {"file": "notes.txt", "list": "written.json"}[link]
        linked.rename(elsewhere / "moved")
        linked.symlink_to(elsewhere / "moved")
        with pytest.warns(UserWarning, match="not a regular file"):
            AutoConfig.from_pretrained(model)
    assert not (model / "notes.txt").exists()
    assert draft.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_draft_of_another_user_is_left_alone(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    draft = final_draft(tmp_path, {"notes.txt": "notes"}, '["notes.txt"]')
    os.chown(draft, 12345, 12345)
    AutoConfig.from_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    assert (draft / "notes.txt").exists()
    assert not (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("listed", ["garbage", "null", "[1]", "{}", "[]", '["absent"]', "[" * 100_000])
def test_a_damaged_draft_is_ignored_and_removed_by_the_next_save(tmp_path: Path, listed: str) -> None:
    model = patched("alibi", 0)
    model.save_pretrained(tmp_path)
    draft = final_draft(tmp_path, {}, listed, host="x")
    with pytest.warns(UserWarning, match="written.json"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(loaded), outputs(model))
    assert draft.exists()
    model.save_pretrained(tmp_path)
    assert not draft.exists()


def test_a_later_save_of_a_stock_model_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock(0).save_pretrained(tmp_path)
    interrupted_save(patched("alibi", 1), tmp_path, monkeypatch)
    new = stock(2)
    new.save_pretrained(tmp_path)
    assert list(tmp_path.glob(".hf_posenc-*")) == []
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(new))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["whole", "shards"])
def test_a_later_save_without_the_plugin_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    stock(0).save_pretrained(tmp_path)
    draft = interrupted_save(patched("alibi", 1), tmp_path, monkeypatch)
    new = stock(2)
    (tmp_path / "model.safetensors").unlink()
    PreTrainedModel.save_pretrained.__wrapped__(new, tmp_path, **options)  # type: ignore[attr-defined]
    assert draft.exists(), "this was not the save of a process without the plugin"
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(new))
    new.save_pretrained(tmp_path, **options)
    assert not draft.exists()
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(new))


@pytest.mark.parametrize("exists", [False, True], ids=["new-folder", "old-folder"])
@pytest.mark.parametrize("error", [ConnectionError("network down"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("step", ["card", "upload"])
def test_the_saved_model_outlives_a_failed_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exists: bool, step: str
) -> None:
    model, folder = patched("alibi", 0), tmp_path / "named"
    if exists:
        stock(1).save_pretrained(folder)
    _repository(monkeypatch, error if step == "card" else None, error if step == "upload" else None)
    with pytest.raises(type(error)):
        model.save_pretrained(folder, push_to_hub=True)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(folder)), outputs(model))
    assert list(tmp_path.rglob(".hf_posenc-*")) == []


def test_an_upload_has_what_transformers_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _repository(monkeypatch, None, None)
    options = {"push_to_hub": True, "token": "t", "commit_message": "first", "create_pr": True, "private": True}
    for kind, model in (("stock", stock(0)), ("patched", patched("alibi", 0))):
        folder = tmp_path / kind / "named"
        folder.mkdir(parents=True)
        (folder / "old.txt").write_text("old")
        model.save_pretrained(folder, **options)
    stock_calls, patched_calls = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert stock_calls == patched_calls
    name, arguments = stock_calls[-1]
    assert name == "create_commit"
    assert arguments["files"] == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert arguments["commit_message"] == "first"


def _repository(
    monkeypatch: pytest.MonkeyPatch, at_card: BaseException | None, at_upload: BaseException | None
) -> list[tuple[str, Any]]:
    """Stands in for the hub; gives the list of the calls it gets."""
    calls: list[tuple[str, Any]] = []

    class Card:
        def save(self, path: Any) -> None:
            Path(path).write_text("card")

    class Repository:
        def create_repo(self, repo_id: str, **options: Any) -> Any:
            calls.append(("create_repo", (repo_id, options)))
            return type("Url", (), {"repo_id": repo_id})()

        def create_commit(self, operations: Any, **options: Any) -> None:
            if at_upload is not None:
                raise at_upload
            files = sorted(operation.path_in_repo for operation in operations)
            calls.append(("create_commit", options | {"files": files}))

    def card(*args: Any, **kwargs: Any) -> Card:
        if at_card is not None:
            raise at_card
        calls.append(("card", (args, kwargs)))
        return Card()

    monkeypatch.setattr("transformers.modeling_utils.hf_api", Repository)
    monkeypatch.setattr("transformers.utils.hub.hf_api", Repository)
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", card)
    return calls


def test_a_folder_with_a_long_name(tmp_path: Path) -> None:
    model, folder = patched("alibi", 0), tmp_path / ("x" * 230)
    model.save_pretrained(folder)
    model.save_pretrained(folder)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(folder)), outputs(model))
    assert list(tmp_path.iterdir()) == [folder]


def test_files_below_the_folder_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "model"
    (target / "part").mkdir(parents=True)
    (target / "part" / "old").write_text("old")
    with atomic_folder.atomic_replacement(target) as draft:
        (draft / "part").mkdir()
        (draft / "part" / "new").write_text("new")
        (draft / "config.json").write_text("{}")
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == {
        "config.json",
        "part",
        os.path.join("part", "old"),
        os.path.join("part", "new"),
    }
