"""A save that is killed, at any of its file operations, leaves the old model or the new one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.checkpoint.atomic_folder import atomic_replacement
from tests.checkpoint.checkpoint_cases import LORA, assert_same, base, llama, made, outputs, token_ids
from tests.fresh import printed, run_fresh
from tests.thinning import mostly_slow

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ends child processes by signal")

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
BESIDE = {"tokenizer.json": "tokens", "optimizer.pt": "states", "runs/events": "log"}


def killed_at(operation: int, folder: Path, save: Callable[[], Any]) -> bool:
    """Runs `save` in a child that ends itself before its n-th change of files in a folder; whether it got that far."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if event in OPERATIONS and not reads and any(str(folder) in str(argument) for argument in arguments):
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


def content_of(folder: Path) -> frozenset[tuple[str, str]]:
    """Paths and digests of the files below a folder, regardless of the names of drafts."""
    return frozenset(
        (
            re.sub(r"\.(hf_posenc|adapter)-[^/]*|-[0-9a-f]{8}$", "draft", str(path.relative_to(folder))),
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in folder.rglob("*")
    )


def moments(place: Path, pristine: Path | None, save: Callable[[], Any]) -> Iterator[bool]:
    """Kills a save at each of its operations. Yields where it has left other files than before, and at its end.

    Args:
        pristine: its content before; `None` if it does not exist.

    Yields:
        Whether the save was killed.
    """
    operation, killed, seen = 1, True, set()
    while killed:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if pristine is not None:
            shutil.copytree(pristine, place / "model")
        killed = killed_at(operation, place, save)
        content = content_of(place)
        if content not in seen or not killed:
            seen.add(content)
            yield killed
        operation += 1
    assert operation > 10


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "hf_posenc" in path.name]


READ_BY_OTHERS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM

def adapted(folder):
    from peft import PeftModel
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(sys.argv[3]), folder)

readers = {"auto": AutoModelForCausalLM.from_pretrained, "class": LlamaForCausalLM.from_pretrained, "adapter": adapted}
ids = torch.load(sys.argv[1])
for folder in sorted(Path(sys.argv[2]).glob("*/*")):
    for name, reader in readers.items():
        if (name == "adapter") != folder.parent.name.startswith("adapter"):
            continue
        try:
            with torch.no_grad():
                torch.save(reader(folder).eval()(input_ids=ids, use_cache=False)[0], folder / f"{name}.outputs")
        except Exception as error:
            (folder / f"{name}.refused").write_text(str(error))
"""


@dataclass
class Others:
    """Folders that processes without the package will read. They load one of the stock models, and nothing else."""

    root: Path
    #: The outputs of the stock models that are saved there before or after, by the name of a case.
    stocks: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, case: str, folder: Path) -> None:
        number = len(list((self.root / case).glob("*")))
        shutil.copytree(folder, self.root / case / f"{number:03}")

    def check(self, base_model: Path) -> None:
        torch.save(token_ids(), self.root.with_name("ids"))
        printed(run_fresh(READ_BY_OTHERS, self.root.with_name("ids"), self.root, base_model))
        for case, stocks in self.stocks.items():
            seen: set[int] = set()
            for read in (self.root / case).glob("*/*.outputs"):
                same = {number for number, stock in enumerate(stocks) if torch.equal(torch.load(read), stock)}
                assert same, f"two models are mixed in {read}"
                seen |= same
            assert seen == set(range(len(stocks))), case
            refusal = "hf_posenc|Can't find" if case.startswith("adapter") else "hf_posenc"
            for file in (self.root / case).glob("*/*.refused"):
                assert re.search(refusal, file.read_text()), file


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, stock: Path) -> Iterator[Others]:
    """Its folders are read when all tests have added theirs, since such a process takes long to start."""
    found = Others(tmp_path_factory.mktemp("others") / "folders")
    yield found
    found.check(stock)


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


#: Each way of changing the scheme once, and each way of changing the names of the files of weights.
CHOSEN = ("new folder", "stock, to shards", "same scheme, shards", "other scheme, from shards", "to stock, from shards")


@pytest.mark.long
@pytest.mark.parametrize("case", mostly_slow(SAVES, (*CHOSEN, "to stock", "other variant").__contains__))
def test_old_or_new_or_refused_and_never_mixed(tmp_path: Path, case: str, others: Others) -> None:
    before, (scheme, options) = SAVES[case]
    new = made(scheme, seed=1)
    expected = {"new": outputs(new)}
    pristine, model = tmp_path / "pristine", tmp_path / "place" / "model"
    if before is not None:
        old = made(before[0])
        expected["old"] = outputs(old)
        old.save_pretrained(pristine, **before[1])
        for name, text in BESIDE.items():
            (pristine / name).parent.mkdir(exist_ok=True)
            (pristine / name).write_text(text)
    met = set()
    for killed in moments(model.parent, pristine if before else None, lambda: new.save_pretrained(model, **options)):
        if model.exists():
            others.add(case, model)
            met.add(loaded_as(expected, model, before[1].get("variant") if before is not None and killed else None))
            assert all((model / name).read_text() == text for name, text in BESIDE.items() if before is not None)
        else:
            assert before is None
            met.add("old")
        new.save_pretrained(model, **options)
        assert drafts(model.parent) == []
    assert met - {"refused"} == {"old", "new"}
    weights = {path.name for path in model.glob("*.safetensors*") if ".old." not in path.name}
    new.save_pretrained(tmp_path / "fresh", **options)
    assert weights == {path.name for path in (tmp_path / "fresh").glob("*.safetensors*")}, "old weights are left"
    models = {"old": before, "new": (scheme, options)}
    others.stocks[case] = [expected[name] for name, kind in models.items() if kind is not None and kind[0] is None]


def loaded_as(expected: dict[str, torch.Tensor], folder: Path, variant: str | None) -> str:
    """Which of two models a process with the package loads."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, variant=variant)
    except (hf_posenc.PositionEncodingError, OSError):
        return "refused"
    (found,) = [name for name, model in expected.items() if torch.equal(outputs(loaded), model)]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"), [(None, "alibi"), ("alibi", "kerple"), ("t5", "t5"), ("alibi", None)], ids=str
)
def test_an_adapter_is_the_old_or_the_new_or_refused_after_a_kill(
    tmp_path: Path, stock: Path, others: Others, before: str | None, after: str | None
) -> None:
    peft = pytest.importorskip("peft")

    def loaded(folder: Path) -> torch.Tensor:
        return outputs(peft.PeftModel.from_pretrained(base(stock), folder))

    def adapter(scheme: str | None, seed: int) -> Any:
        model = base(stock) if scheme is None else hf_posenc.patch_model(base(stock), scheme)
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **LORA)).eval()

    case, pristine, folder = f"adapter {before} {after}", tmp_path / "pristine", tmp_path / "place" / "model"
    adapter(before, 1).save_pretrained(pristine)
    new = adapter(after, 2)
    expected, met, refusals = [loaded(pristine), outputs(new)], set(), set()
    for _ in moments(folder.parent, pristine, lambda: new.save_pretrained(folder)):
        others.add(case, folder)
        try:
            found = loaded(folder)
        except (hf_posenc.PositionEncodingError, ValueError) as error:
            refusals.add(str(error))
        else:
            (same,) = [number for number, model in enumerate(expected) if torch.equal(found, model)]
            met.add(same)
    assert met == {0, 1}
    assert all(re.search("different saves|missing|Can't find", refusal) for refusal in refusals)
    others.stocks[case] = [model for model, scheme in zip(expected, (before, after), strict=True) if scheme is None]


@pytest.mark.parametrize("place", ["", None, "file", "file/below", "link", 3, b"bytes"], ids=repr)
def test_what_is_no_folder_is_refused_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained(".")
    Path("file").write_text("text")
    Path("link").symlink_to("nowhere")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for model in (made(seed=1), patched := made("alibi", seed=1)):
        with contextlib.nullcontext() if place == "file" else pytest.raises((OSError, TypeError)):
            model.save_pretrained(place)
    with pytest.raises((OSError, TypeError)):
        hf_posenc.save_position_adapter(patched, place)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["~/model", Path("below/model"), "link", "x" * 230], ids=lambda place: str(place)[:9])
def test_the_paths_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("folder")
    model = made("alibi")
    for _ in range(2):
        model.save_pretrained(place)
        assert (Path(place) / "config.json").is_file()
        assert_same(AutoModelForCausalLM.from_pretrained(place), model)
    assert Path("link").is_symlink()
    assert drafts(tmp_path) == []


def test_an_error_names_the_folder_and_not_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if ".hf_posenc-" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError) as caught:
        made("alibi").save_pretrained(tmp_path / "model")
    assert str(caught.value) == f"[Errno {errno.EACCES}] Permission denied: '{tmp_path / 'model'}'"


def test_what_others_write_during_an_atomic_save_stays(tmp_path: Path) -> None:
    """Other ranks and processes, also into a folder that did not exist."""
    target, new = tmp_path / "model", tmp_path / "checkpoint-1"
    (target / ".cache").mkdir(parents=True)
    (target / "part").mkdir()
    (target / "part" / "old").write_text("old")
    (tmp_path / ".model-backup-1-2").mkdir()
    with atomic_replacement(target) as mine:
        (mine / "config.json").write_text("mine")
        (mine / "part").mkdir()
        (mine / "part" / "new").write_text("new")
        with atomic_replacement(target) as other:
            (other / "config.json").write_text("other")
        assert mine.exists()
    with atomic_replacement(new) as draft:
        (draft / "model.safetensors").write_text("weights")
        new.mkdir()
        (new / "rng_state_1.pth").write_text("state")
    assert (target / "config.json").read_text() == "mine"
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {
        ".model-backup-1-2", "model", "model/.cache", "model/config.json", "model/part", "model/part/old",
        "model/part/new", "checkpoint-1", "checkpoint-1/model.safetensors", "checkpoint-1/rng_state_1.pth",
    }  # fmt: skip


def test_arguments_of_save_pretrained(tmp_path: Path) -> None:
    model = made("alibi")
    model.save_pretrained(tmp_path / "other_rank", is_main_process=False)
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "model"
    model.save_pretrained(folder, variant="fp16")
    model.save_pretrained(str(folder), True, {k: v * 2 for k, v in model.state_dict().items()}, False)
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.fp16.safetensors", "model.safetensors"}
    assert_same(AutoModelForCausalLM.from_pretrained(folder, variant="fp16"), model)
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
