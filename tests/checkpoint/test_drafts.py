"""Remains of an earlier save in a folder never damage another file, a newer model, or a load."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_posenc.checkpoint import atomic_folder
from tests.checkpoint.checkpoint_cases import assert_same, llama, made


def gone_process() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def final_draft(folder: Path, listed: str, files: tuple[str, ...] = (), host: str | None = None) -> Path:
    llama().config.save_pretrained(folder)
    draft = folder / f".hf_posenc-{host or socket.gethostname()}-{gone_process()}-00000000"
    draft.mkdir()
    for name in files:
        (draft / name).write_text("{}")
    (draft / "written.json").write_text(listed)
    return draft


@pytest.mark.parametrize("host", [None, "x"], ids=["this-host", "other-host"])
@pytest.mark.parametrize("outside", ["../train.py", "absolute", "a/../../train.py", "..", ""])
def test_a_draft_changes_nothing_outside_its_folder(tmp_path: Path, outside: str, host: str | None) -> None:
    model, mine = tmp_path / "model", tmp_path / "train.py"
    mine.write_text("mine")
    listed = json.dumps(["config.json", str(mine) if outside == "absolute" else outside])
    draft = final_draft(model, listed, ("config.json",), host)
    (model / "train.py").write_text("evil")
    with pytest.warns(UserWarning, match="not a file directly inside it"):
        assert AutoConfig.from_pretrained(model).model_type == "llama"
    assert mine.read_text() == "mine"
    assert (draft / "config.json").exists()


@pytest.mark.parametrize("link", ["file", "draft", "list"])
def test_a_draft_with_links_is_not_applied(tmp_path: Path, link: str, recwarn: pytest.WarningsRecorder) -> None:
    model = tmp_path / "model"
    draft = final_draft(model, '["notes.txt"]', ("notes.txt",))
    linked = {"file": draft / "notes.txt", "list": draft / "written.json", "draft": draft}[link]
    linked.rename(tmp_path / "moved")
    linked.symlink_to(tmp_path / "moved")
    AutoConfig.from_pretrained(model)
    assert any("not a regular file" in str(warning.message) for warning in recwarn) == (link != "draft")
    assert not (model / "notes.txt").exists()
    assert draft.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_draft_of_another_user_is_left_alone(tmp_path: Path) -> None:
    draft = final_draft(tmp_path, '["notes.txt"]', ("notes.txt",))
    os.chown(draft, 12345, 12345)
    AutoConfig.from_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    assert (draft / "notes.txt").exists()
    assert not (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("listed", ["garbage", "null", "[1]", "{}", "[]", '["absent"]', "[" * 100_000])
def test_a_damaged_draft_is_ignored_and_removed_by_the_next_save(tmp_path: Path, listed: str) -> None:
    model = made("alibi")
    draft = final_draft(tmp_path, listed, host="x")
    PreTrainedModel.save_pretrained.__wrapped__(model, tmp_path)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"written\.json"):
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    assert draft.exists()
    model.save_pretrained(tmp_path)
    assert not draft.exists()


@pytest.mark.parametrize("final", [False, True])
def test_a_draft_ends_with_its_process_and_not_with_its_number(tmp_path: Path, final: bool) -> None:
    """In a container, every process may have the number 1."""
    draft = tmp_path / f".hf_posenc-{socket.gethostname()}-{os.getpid()}-00000000"
    draft.mkdir()
    if final:
        (draft / "written.json").write_text("[]")
    made("alibi").save_pretrained(tmp_path)
    assert not draft.exists()


@pytest.mark.parametrize("plugin", [True, False], ids=["with the plugin", "without"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["whole", "shards"])
def test_a_later_save_of_a_stock_model_wins_over_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], plugin: bool
) -> None:
    made().save_pretrained(tmp_path)
    replace = os.replace

    def interrupt(source: Any, target: Any) -> None:
        if Path(target).name == "config.json":
            raise KeyboardInterrupt
        replace(source, target)

    # Everything but `config.json` is in place, and the process is gone.
    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder.os, "getpid", gone_process)
        patch.setattr(atomic_folder.os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made("alibi", seed=1).save_pretrained(tmp_path)
    (draft,) = tmp_path.glob(".hf_posenc-*")
    new = made(seed=2)
    if not plugin:
        (tmp_path / "model.safetensors").unlink()
        PreTrainedModel.save_pretrained.__wrapped__(new, tmp_path, **options)  # type: ignore[attr-defined]
        assert draft.exists(), "this was not the save of a process without the plugin"
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), new)
    new.save_pretrained(tmp_path, **options)
    assert not draft.exists()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), new)
