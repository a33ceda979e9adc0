"""The GPU kit on a CPU: its smoke run as a whole, and its checks with stand-ins for what goes wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.errors import BenchmarkError
from hf_posenc import UnsupportedError, get_scheme, list_schemes
from tests import fresh
from tests.kits.gpu import __main__ as kit, cells, correctness, launches
from tests.kits.gpu.cells import Part
from tests.kits.gpu.checks import CHECKS
from tests.kits.gpu.correctness import Case, Correctness, plan
from tests.kits.gpu.launches import Launches
from tests.kits.gpu.models import DECODER
from tests.kits.gpu.rows import CANNOT_TELL, CRASHED, OK, REFUSED, SKIPPED, WRONG, PartFile
from tests.kits.gpu.table import format_kit


@pytest.fixture(scope="module", autouse=True)
def _one_fork_server() -> Iterator[None]:
    """A process has one fork server. In a process of tests it stays that of `tests.fresh`, without this package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fresh._CONTEXT, "set_forkserver_preload", lambda modules: None)
        yield


def smoke_run(folder, *words: str) -> int:
    return kit.main(["--smoke", "--device", "cpu", "--output_dir", str(folder), *words])


#: What the tests of the command need: of each kind a cell, and one that is refused.
_FEW = ("forward model rope", "forward encoder forget_gate", "dynamic_cache model t5")


@contextlib.contextmanager
def few_cells() -> Iterator[None]:
    """A smoke run has a few of its cells, and runs them in this process."""
    chosen = [case for case in plan(smoke=True) if " ".join(case[:3]) in _FEW]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correctness, "plan", lambda smoke: chosen)
        patch.setattr(launches, "_PHASES", {DECODER: ("forward",)})
        patch.setattr(cells, "each", lambda run, blocks, **options: [(block, run(block), "") for block in blocks])
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The results of a run of few cells."""
    folder = tmp_path_factory.mktemp("few")
    with few_cells():
        assert smoke_run(folder) == 0
    return folder


@pytest.fixture
def copied(small, tmp_path):
    """A copy of them in a separate folder; the next runs have few cells, too."""
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    with few_cells():
        yield tmp_path


def files(folder) -> dict[str, PartFile]:
    return {part: PartFile(folder / f"{part}.jsonl") for part in kit.PARTS}


def rewrite(path, change) -> None:
    """Changes the lines of a file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(changed)}\n" for changed in map(change, lines) if changed is not None))


@pytest.mark.long
def test_a_smoke_run_goes_through_every_part(tmp_path):
    assert smoke_run(tmp_path) == 0
    names = files(tmp_path)
    for file in names.values():
        assert list(file.rows) == file.headers[-1]["cells"]
        assert not [cell for cell, row in file.rows.items() if row["status"] in (WRONG, CRASHED)]
    rows = names["correctness"].rows
    assert rows["forward model alibi bfloat16 flex_attention"]["status"] == OK
    assert rows["forward encoder forget_gate float32 sdpa"]["status"] == REFUSED
    assert rows["cuda_graphs model alibi float32 sdpa"]["reason"] == "CUDA graphs need a GPU"
    assert {row["status"] for row in rows.values()} == {OK, REFUSED, SKIPPED}


def test_the_table_names_the_machine_and_every_part(small):
    text = (small / "table.md").read_text()
    for expected in (
        files(small)["launches"].headers[-1]["machine"]["cpu"],
        f"torch {torch.__version__}",
        "Subnormal float32 numbers take",
        "A smoke run",
        "| forward       | flex_attention |",
        "### Cells that are refused",
        "what needs it left out: flash_attn",
    ):
        assert expected in text
    assert "not run yet" not in text


def test_the_same_command_goes_on_with_what_is_missing(copied):
    taken = ["forward model rope float32 sdpa", "dynamic_cache model t5 float32 sdpa"]
    path = copied / "correctness.jsonl"
    rewrite(path, lambda line: None if line.get("cell") in taken else line)
    before = path.read_text()
    assert smoke_run(copied, "--parts", "correctness") == 0
    assert path.read_text().startswith(before)
    header, *added = (json.loads(line) for line in path.read_text().removeprefix(before).splitlines())
    assert header["command"].endswith("--parts correctness")
    assert [(line["cell"], line["status"]) for line in added] == [(cell, OK) for cell in taken]


@pytest.mark.parametrize("words", [["--overwrite", "--device", "cuda"], ["--smoke", "--device", "cpu"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_that_is_refused_leaves_the_results_of_another_machine(words, tmp_path, capsys):
    path = tmp_path / "launches.jsonl"
    path.write_text('{"machine": {"gpu": "another"}, "settings": {"smoke": false}, "cells": ["one"]}\n')
    before = path.read_text()
    assert kit.main([*words, "--output_dir", str(tmp_path), "--parts", "launches"]) == 2
    expected = "The device 'cuda' is not available" if "cuda" in words else "gpu 'another' there"
    assert expected in capsys.readouterr().err
    assert path.read_text() == before


def test_a_part_that_is_run_anew_has_new_rows_only(copied):
    path = copied / "launches.jsonl"
    rewrite(path, lambda line: line | ({"machine": {}} if "machine" in line else {"old": True}))
    # Its time is up at once.
    smoke_run(copied, "--parts", "launches", "--overwrite", "--budget_minutes", "1e-9")
    assert PartFile(path).rows == {}
    assert PartFile(path).left == Launches("cpu", True).cells()


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert kit.main(["--smoke", "--output_dir", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_missing_packages_are_told_at_once(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    assert kit.main(["--smoke", "--output_dir", str(tmp_path)]) == 2
    assert f"not installed: {package}. Run: pip install {package}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_supervisor_needs_no_torch():
    code = "import sys, tests.kits.gpu.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    fresh.printed(fresh.run_python("-c", code))


@pytest.fixture
def part() -> Correctness:
    correctness._reference.cache_clear()
    return Correctness("cpu", True)


@pytest.fixture
def broken(monkeypatch):
    """Puts a function in the place of a backend; every model that looks it up by then gets it."""

    def put(function) -> None:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", function)

    return put


_CELL = "forward model rope float32 sdpa"


def test_a_backend_that_scales_otherwise_is_wrong_and_so_is_what_is_not_a_number(part, broken):
    def scaled(by):
        return lambda *args, scaling=None, **kwargs: sdpa_attention_forward(*args, scaling=scaling * by, **kwargs)

    right = part.run(_CELL)
    assert right["status"] == OK
    assert right["error"] < 0.2 * right["tolerance"]
    broken(scaled(1.01))
    wrong = part.run(_CELL)
    assert wrong["status"] == WRONG
    assert wrong["error"] > 10 * wrong["tolerance"]
    broken(scaled(float("nan")))
    row = part.run(_CELL)
    assert (row["status"], row["error"], row["reason"]) == (WRONG, None, "not a number")
    json.dumps(row, allow_nan=False)
    assert part.run("forward model rope float32 eager")["status"] == OK


@pytest.mark.parametrize("check", ["left_padding", "dynamic_cache", "static_cache", "gradients", "long_forward"])
def test_every_check_can_fail(check, part, broken):
    def late(module, query, key, *args, **kwargs):
        # A patched model examines a new function on three keys.
        moved = key if key.shape[2] == 3 else key.roll(1, dims=2)
        return sdpa_attention_forward(module, query, moved, *args, **kwargs)

    broken(late)
    assert part.run(f"{check} model rope float32 sdpa")["status"] == WRONG


def test_a_scheme_that_does_nothing_on_the_device_is_wrong(part, monkeypatch):
    real = correctness.build
    part.run(_CELL)
    monkeypatch.setattr(correctness, "build", lambda kind, scheme: real(kind, "none"))
    row = part.run(_CELL)
    assert row["status"] == WRONG
    # They are relative to the logits of two models.
    assert row["error"] == pytest.approx(row["effect"], rel=0.05)


def test_a_check_that_would_not_notice_a_missing_scheme_cannot_tell(part, monkeypatch):
    assert part.run(_CELL)["status"] == OK
    # A model that `none` has left its own positions would be noticed, too.
    assert part.run(_CELL.replace("rope", "none"))["status"] == OK
    monkeypatch.setitem(correctness.TOLERANCES, "float32", 10.0)
    for cell in (_CELL, _CELL.replace("rope", "none")):
        row = part.run(cell)
        assert row["status"] == CANNOT_TELL
        assert "no error in it would show" in row["reason"]


def test_a_wrong_row_is_in_the_table_and_in_the_exit_status(copied, monkeypatch):
    path = copied / "correctness.jsonl"
    wrong = {"cell": _CELL, "status": WRONG, "error": 0.5, "tolerance": 5e-5, "reason": "error 0.5, tolerance 5e-05"}
    PartFile(path).add(wrong)
    monkeypatch.setattr(cells, "run_part", lambda *given: None)
    assert kit.main(["--smoke", "--output_dir", str(copied)]) == 1
    text = (copied / "table.md").read_text()
    assert f"- error 0.5, tolerance 5e-05 (`{_CELL}`)" in text
    assert text == format_kit(files(copied))


@dataclass(frozen=True)
class Stub(Part):
    """Its cells do what they are called."""

    def settings(self):
        return {}

    def cells(self):
        return ["one", "killed", "raises", "refused", "two"]

    def run(self, cell):
        if cell == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if cell == "raises":
            raise RuntimeError("CUDA out of memory. Tried to allocate 7 GiB\nmore")
        if cell == "refused":
            raise UnsupportedError("not here")
        return {"status": OK}


@pytest.fixture
def begun(tmp_path) -> PartFile:
    file = PartFile(tmp_path / "stub.jsonl")
    file.add({"machine": {}, "settings": {}, "cells": Stub("cpu", True).cells()})
    return file


def test_what_crashes_costs_one_cell(begun):
    cells.run_cells(Stub("cpu", True), begun, workers=2, seconds=600.0, cell_seconds=300.0)
    assert {cell: row["status"] for cell, row in begun.rows.items()} == {
        "one": OK, "killed": CRASHED, "raises": CRASHED, "refused": REFUSED, "two": OK,
    }  # fmt: skip
    assert begun.rows["killed"]["reason"] == "the process died"
    assert begun.rows["raises"]["reason"].startswith("RuntimeError: CUDA out of memory. Tried to allocate 7 GiB (test")
    assert PartFile(begun.path).rows == begun.rows


def test_nothing_is_begun_when_the_time_is_up(capsys):
    assert cells.Block(Stub("cpu", True), ("one", "two"), end=time.time() - 1, seconds=60.0).run() == {}
    assert cells.Block(Stub("cpu", True), ("one", "two"), end=math.inf, seconds=-1.0).run() == {}


def test_a_gpu_in_an_error_state_gets_another_process(monkeypatch):
    def illegal(*shape, device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.ones", illegal)
    assert list(cells.Block(Stub("cuda", True), ("raises", "two"), math.inf, 60.0).run()) == ["raises"]


def test_the_next_line_replaces_one_that_was_cut_off(tmp_path):
    path = tmp_path / "launches.jsonl"
    path.write_text('{"machine": {}, "cells": ["one", "two"]}\n{"cell": "one", "status": "ok"}\n{"cell": "tw')
    file = PartFile(path)
    assert file.left == ["two"]
    file.add({"cell": "two", "status": "ok"})
    assert PartFile(path).left == []


@pytest.mark.parametrize("line", ["not JSON", "[]", '{"text": "a data set"}'])
def test_a_file_with_something_else_is_refused(tmp_path, line):
    path = tmp_path / "launches.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(BenchmarkError, match="cannot be read"):
        PartFile(path)
    assert path.read_text() == f"{line}\n"


def test_every_scheme_is_checked_on_every_backend(monkeypatch):
    cases = plan(smoke=False)
    assert Correctness("cuda", False).cells() == [" ".join(case) for case in cases]
    assert len(cases) == len(set(cases))
    assert all(Case(*" ".join(case).split(" ")) == case for case in cases)
    assert {case.check for case in cases} == set(CHECKS)
    schemes = {name for name in list_schemes() if not get_scheme(name).combinator}
    for backend, dtypes in {"eager": 3, "sdpa": 3, "flex_attention": 2}.items():
        checked = {(case.scheme, case.dtype) for case in cases if case.backend == backend and case.check == "forward"}
        assert {scheme for scheme, _ in checked} == schemes
        assert len(checked) >= dtypes * len(schemes)
    assert not any("flash" in case.backend for case in cases)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    flash = {case.dtype for case in plan(smoke=False) if case.backend == "flash_attention_2"}
    assert flash == {"bfloat16", "float16"}
