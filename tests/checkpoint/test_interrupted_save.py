"""A save that is killed, at any of its file operations, leaves the old model or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
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
from tests.checkpoint.checkpoint_cases import llama, outputs, randomize, token_ids
from tests.fresh import run_fresh

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


def stock(seed: int) -> Any:
    torch.manual_seed(seed)
    return randomize(llama())


SHARDS = {"max_shard_size": "50KB"}
#: What a folder holds and what is saved there: the scheme (`None` for a stock model), and options of the save.
SAVES: dict[str, tuple[tuple[str | None, dict[str, Any]] | None, tuple[str | None, dict[str, Any]]]] = {
    "new folder": (None, ("alibi", SHARDS)),
    "stock": ((None, {}), ("alibi", {})),
    "stock, from shards": ((None, SHARDS), ("alibi", {})),
    "stock, to shards": ((None, {}), ("kerple", SHARDS)),
    "same scheme": (("alibi", {}), ("alibi", {})),
    "same scheme, shards": (("alibi", SHARDS), ("alibi", SHARDS)),
    "other scheme, from shards": (("alibi", SHARDS), ("kerple", {})),
    "other scheme, to shards": (("kerple", {}), ("alibi", SHARDS)),
    "to stock": (("alibi", {}), (None, {})),
    "to stock, from shards": (("kerple", SHARDS), (None, {})),
    "to stock, to shards": (("alibi", {}), (None, SHARDS)),
    "other variant": (("alibi", {"variant": "old"}), ("alibi", {})),
}

READ_BY_OTHERS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM

def adapted(folder):
    from peft import PeftModel
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(sys.argv[3]), folder)

readers = {"auto": AutoModelForCausalLM.from_pretrained, "class": LlamaForCausalLM.from_pretrained, "adapter": adapted}
ids = torch.load(sys.argv[1])
for folder in sorted(Path(sys.argv[2]).iterdir()):
    for name, reader in readers.items():
        if (name == "adapter") != (len(sys.argv) > 3):
            continue
        try:
            with torch.no_grad():
                torch.save(reader(folder).eval()(input_ids=ids, use_cache=False)[0], folder / f"{name}.outputs")
        except Exception as error:
            (folder / f"{name}.refused").write_text(str(error))
"""


def check_other_readers(states: Path, stocks: list[torch.Tensor], *arguments: object, refusal: str) -> None:
    """Whether processes without the package load one of the stock models, and nothing else.

    Args:
        states: a folder for each moment at which a save was killed.
        stocks: the outputs of the stock models that are saved there before or after.
        *arguments: the base model of adapters.
        refusal: an expression that is found in every error.
    """
    torch.save(token_ids(), states.with_name("ids"))
    done = run_fresh(READ_BY_OTHERS, states.with_name("ids"), states, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    seen: set[int] = set()
    for read in states.glob("*/*.outputs"):
        same = {number for number, stock in enumerate(stocks) if torch.equal(torch.load(read), stock)}
        assert same, f"two models are mixed in {read}"
        seen |= same
    assert seen == set(range(len(stocks)))
    for refused in states.glob("*/*.refused"):
        assert re.search(refusal, refused.read_text())


@pytest.mark.parametrize("case", SAVES)
def test_old_or_new_or_refused_and_never_mixed(tmp_path: Path, case: str) -> None:
    before, (scheme, options) = SAVES[case]
    new = stock(1) if scheme is None else patched(scheme, 1)
    expected = {"new": outputs(new)}
    pristine, place, states = tmp_path / "pristine", tmp_path / "place", tmp_path / "states"
    if before is not None:
        old = stock(0) if before[0] is None else patched(before[0], 0)
        expected["old"] = outputs(old)
        old.save_pretrained(pristine, **before[1])
        for name, text in BESIDE.items():
            (pristine / name).parent.mkdir(exist_ok=True)
            (pristine / name).write_text(text)
    met, operation = set(), 1
    while True:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if before is not None:
            shutil.copytree(pristine, place / "model")
        killed = killed_at(operation, place, lambda: new.save_pretrained(place / "model", **options))
        if (place / "model").exists():
            shutil.copytree(place / "model", states / f"{operation:03}")
            variant = before[1].get("variant") if before is not None else None
            met.add(loaded_as(expected, place / "model", variant if killed else None))
            for path, text in BESIDE.items() if before is not None else ():
                assert (place / "model" / path).read_text() == text
        else:
            assert before is None
            met.add("old")
        new.save_pretrained(place / "model", **options)
        assert drafts(place) == []
        if not killed:
            break
        operation += 1
    assert met - {"refused"} == {"old", "new"}
    assert operation > 10
    weights = {path.name for path in (place / "model").glob("*.safetensors*") if ".old." not in path.name}
    fresh = tmp_path / "fresh"
    new.save_pretrained(fresh, **options)
    assert weights == {path.name for path in fresh.glob("*.safetensors*")}, "weights of the old model are left"
    models = {"old": before, "new": (scheme, options)}
    stocks = [expected[name] for name, model in models.items() if model is not None and model[0] is None]
    check_other_readers(states, stocks, refusal="hf_posenc")


def loaded_as(expected: dict[str, torch.Tensor], folder: Path, variant: str | None) -> str:
    """Which of two models a process with the package loads."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, variant=variant)
    except (hf_posenc.PositionEncodingError, OSError):
        return "refused"
    (found,) = [name for name, model in expected.items() if torch.equal(outputs(loaded), model)]
    return found


@pytest.mark.parametrize(
    ("before", "after"), [(None, "alibi"), ("alibi", "kerple"), ("t5", "t5"), ("alibi", None)], ids=str
)
def test_an_adapter_is_the_old_or_the_new_or_refused(tmp_path: Path, before: str | None, after: str | None) -> None:
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    stock(0).save_pretrained(base)

    def loaded(folder: Path) -> torch.Tensor:
        return outputs(peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).eval())

    def adapter(scheme: str | None, seed: int) -> Any:
        model = LlamaForCausalLM.from_pretrained(base)
        if scheme is not None:
            hf_posenc.patch_model(model, scheme)
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config).eval()

    pristine, place, states = tmp_path / "pristine", tmp_path / "place", tmp_path / "states"
    adapter(before, 1).save_pretrained(pristine)
    new = adapter(after, 2)
    expected, met, refusals, operation, killed = [loaded(pristine), outputs(new)], set(), set(), 1, True
    while killed:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(pristine, place)
        killed = killed_at(operation, place, lambda: new.save_pretrained(place))
        shutil.copytree(place, states / f"{operation:03}")
        try:
            found = loaded(place)
        except (hf_posenc.PositionEncodingError, ValueError) as error:
            refusals.add(str(error))
        else:
            (same,) = [number for number, model in enumerate(expected) if torch.equal(found, model)]
            met.add(same)
        operation += 1
    assert met == {0, 1}
    assert all(re.search("different saves|missing|Can't find", refusal) for refusal in refusals)
    stocks = [model for model, scheme in zip(expected, (before, after), strict=True) if scheme is None]
    check_other_readers(states, stocks, base, refusal="hf_posenc|Can't find")


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


@pytest.mark.parametrize("final", [False, True])
def test_a_draft_ends_with_its_process_and_not_with_its_number(tmp_path: Path, final: bool) -> None:
    """In a container, every process may have the number 1."""
    name = f".hf_posenc-{socket.gethostname()}-{os.getpid()}-00000000"
    (tmp_path / name).mkdir()
    if final:
        (tmp_path / name / "written.json").write_text("[]")
    patched("alibi", 0).save_pretrained(tmp_path)
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("place", ["", None, "file", "file/below", "link", 3, b"bytes"], ids=repr)
@pytest.mark.parametrize("scheme", [None, "alibi"])
def test_what_is_no_folder_is_refused_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, scheme: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    stock(0).save_pretrained(".")
    Path("file").write_text("text")
    Path("link").symlink_to("nowhere")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    model = stock(1) if scheme is None else patched(scheme, 1)
    with contextlib.nullcontext() if place == "file" else pytest.raises((OSError, TypeError)):
        model.save_pretrained(place)
    with pytest.raises((OSError, TypeError)):
        hf_posenc.save_position_adapter(patched("alibi", 1), place)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["~/model", Path("below/model"), "link"], ids=str)
def test_the_paths_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("folder")
    model = patched("alibi", 0)
    model.save_pretrained(place)
    assert (Path(place) / "config.json").is_file()
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(place)), outputs(model))


def test_an_error_names_the_folder_and_not_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if ".hf_posenc-" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError) as caught:
        patched("alibi", 0).save_pretrained(tmp_path / "model")
    assert str(caught.value) == f"[Errno {errno.EACCES}] Permission denied: '{tmp_path / 'model'}'"


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
