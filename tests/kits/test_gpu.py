"""The GPU kit on a CPU: its smoke run as a whole, and its checks with stand-ins for what goes wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc import get_scheme, list_schemes
from tests.kits.gpu import __main__ as kit, correctness, worker
from tests.kits.gpu.checks import CHECKS
from tests.kits.gpu.correctness import Case, Correctness, plan
from tests.kits.gpu.price import Price
from tests.kits.gpu.rows import CANNOT_TELL, CRASHED, OK, REFUSED, SKIPPED, WRONG, PartFile
from tests.kits.gpu.study import Study
from tests.kits.gpu.suites import read_report
from tests.kits.gpu.table import format_kit
from tests.kits.gpu.worker import OutOfTimeError


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    status = kit.main(["--smoke", "--device", "cpu", "--output_dir", str(folder)])
    return status, folder


@pytest.fixture
def copied(smoke, tmp_path):
    """The results of the smoke run, in a folder of their own."""
    shutil.copytree(smoke[1], tmp_path, dirs_exist_ok=True)
    return tmp_path


def files(folder) -> dict[str, PartFile]:
    return {part: PartFile(folder / f"{part}.jsonl") for part in kit.PARTS}


def rewrite(path, change) -> None:
    """Changes the lines of a file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(changed)}\n" for changed in map(change, lines) if changed is not None))


def request(folder, part: str, **changes):
    """What the supervisor asks of a worker."""
    path = str(folder / f"{part}.jsonl")
    asked = {"part": part, "command": "x", "path": path, "smoke": True, "device": "cpu", "overwrite": False}
    asked |= {"worker": 0, "workers": 1}
    return asked | {"cell_seconds": 60.0, "seconds": 60.0} | changes


@pytest.mark.long
def test_a_smoke_run_goes_through_every_part(smoke):
    status, folder = smoke
    names = files(folder)
    for file in names.values():
        assert list(file.rows) == file.headers[-1]["cells"]
        assert not [cell for cell, row in file.rows.items() if row["status"] in (WRONG, CRASHED)]
    assert status == 0
    rows = names["correctness"].rows
    assert rows["forward model alibi bfloat16 flex_attention"]["status"] == OK
    assert rows["forward encoder forget_gate float32 sdpa"]["status"] == REFUSED
    assert rows["cuda_graphs model alibi float32 sdpa"]["reason"] == "CUDA graphs need a GPU"
    assert {row["status"] for row in rows.values()} == {OK, REFUSED, SKIPPED}
    losses = [row["by_length"]["loss"] for row in names["study"].rows.values()]
    assert len(losses) == 3
    assert all(len(pair) == 2 and 4 < pair[0] < 8 for pair in losses)


def test_the_table_names_the_machine_and_every_part(smoke):
    _, folder = smoke
    text = (folder / "table.md").read_text()
    for expected in (
        files(folder)["price"].headers[-1]["machine"]["cpu"],
        f"torch {torch.__version__}",
        "Subnormal float32 numbers take",
        "A smoke run",
        "| forward       | flex_attention |",
        "### Cells that are refused",
        "### A tiny Llama, a token for each of 16 sequences after a cache of T, over bare",
        "| alibi  |    0 |",
    ):
        assert expected in text
    assert "what needs it left out: flash_attn" in text
    assert "SmolLM2-135M" not in text
    assert "Targets" not in text
    assert "not run yet" not in text


def test_the_same_command_goes_on_with_what_is_missing(copied):
    taken = ["forward model rope float32 sdpa", "left_padding model t5 float32 sdpa"]
    path = copied / "correctness.jsonl"
    rewrite(path, lambda line: None if line.get("cell") in taken else line)
    before = path.read_text()
    assert worker.main([json.dumps(request(copied, "correctness"))]) == 0
    assert path.read_text().startswith(before)
    header, *added = (json.loads(line) for line in path.read_text().removeprefix(before).splitlines())
    assert header["command"] == "x"
    assert [(line["cell"], line["status"]) for line in added] == [
        (cell, event) for cell in taken for event in ("started", OK)
    ]


@pytest.mark.parametrize("changes", [{"overwrite": True, "smoke": False, "device": "cuda"}, {}])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_that_is_refused_leaves_the_results_of_another_machine(changes, tmp_path, capsys):
    path = tmp_path / "price.jsonl"
    path.write_text('{"machine": {"gpu": "another"}, "settings": {"smoke": false}, "cells": ["one"]}\n')
    before = path.read_text()
    assert worker.main([json.dumps(request(tmp_path, "price", **changes))]) == kit.FATAL
    assert ("The device 'cuda' is not available" if changes else "gpu 'another' there") in capsys.readouterr().err
    assert path.read_text() == before


def test_a_part_that_is_run_anew_has_new_rows_only(copied):
    path = copied / "price.jsonl"
    rewrite(path, lambda line: line | ({"machine": {}} if "machine" in line else {"old": True}))
    part, file, _ = worker.prepare(request(copied, "price", overwrite=True), lambda: 60.0)
    assert file.left == part.cells()
    assert PartFile(path).rows == part.rows == {}


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert kit.main(["--smoke", "--output_dir", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err


# What is missing.


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_missing_packages_are_told_at_once(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    assert kit.main(["--smoke", "--output_dir", str(tmp_path)]) == 2
    assert f"not installed: {package}. Run: pip install {package}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_supervisor_needs_no_torch():
    code = "import sys, tests.kits.gpu.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What goes wrong in a check.


@pytest.fixture
def part(tmp_path) -> Correctness:
    correctness._reference.cache_clear()
    return Correctness("cpu", True, tmp_path)


@pytest.fixture
def broken(monkeypatch):
    """Puts a function in the place of a backend; every model that looks it up by then gets it."""

    def put(function) -> None:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", function)

    return put


_CELL = "forward model rope float32 sdpa"


def test_a_backend_that_scales_otherwise_is_wrong(part, broken):
    def scaled(*args, scaling=None, **kwargs):
        return sdpa_attention_forward(*args, scaling=scaling * 1.01, **kwargs)

    right = part.run(_CELL)
    assert right["status"] == OK
    assert right["error"] < 0.2 * right["tolerance"]
    broken(scaled)
    wrong = part.run(_CELL)
    assert wrong["status"] == WRONG
    assert wrong["error"] > 10 * wrong["tolerance"]
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


def test_what_is_not_a_number_is_wrong(part, broken):
    def no_number(*args, **kwargs):
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * float("nan"), weights

    broken(no_number)
    row = part.run(_CELL)
    assert (row["status"], row["error"], row["reason"]) == (WRONG, None, "not a number")
    json.dumps(row, allow_nan=False)


def test_a_cell_that_crashes_does_not_end_the_run(part, broken, tmp_path):
    def out_of_memory(*args, **kwargs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 7 GiB\nmore")

    broken(out_of_memory)
    part.cells = lambda: [_CELL, "forward model rope float32 eager"]  # type: ignore[method-assign]
    file = PartFile(tmp_path / "rows.jsonl")
    assert run(part, file, lambda: 60.0, "cpu")
    assert file.rows[_CELL]["status"] == CRASHED
    assert file.rows[_CELL]["reason"].startswith("RuntimeError: CUDA out of memory. Tried to allocate 7 GiB (test_gpu")
    assert file.rows["forward model rope float32 eager"]["status"] == OK


def test_a_wrong_row_is_in_the_table_and_in_the_exit_status(copied, monkeypatch):
    path = copied / "correctness.jsonl"
    wrong = {"cell": _CELL, "status": WRONG, "error": 0.5, "tolerance": 5e-5, "reason": "error 0.5, tolerance 5e-05"}
    PartFile(path).add(wrong)
    monkeypatch.setattr(kit, "run_part", lambda *given: None)
    assert kit.main(["--smoke", "--output_dir", str(copied)]) == 1
    text = (copied / "table.md").read_text()
    assert f"- error 0.5, tolerance 5e-05 (`{_CELL}`)" in text
    assert text == format_kit(files(copied))


# The worker.


def run(part, file, remaining, device) -> bool:
    return worker.run_cells(part, part.cells(), file, remaining, device)


class _Cells:
    def __init__(self, **results) -> None:
        self.results = results

    def cells(self):
        return list(self.results)

    def run(self, cell):
        if isinstance(self.results[cell], BaseException):
            raise self.results[cell]
        return {"status": self.results[cell]}


def test_a_cell_that_is_out_of_time_has_no_row_and_is_the_last_one(tmp_path):
    file = PartFile(tmp_path / "rows.jsonl")
    assert run(_Cells(one=OK, two=OutOfTimeError(), three=OK), file, lambda: 1.0, "cpu")
    assert list(file.rows) == ["one"]
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [(line["cell"], line["status"]) for line in lines] == [("one", "started"), ("one", OK), ("two", "started")]


def test_nothing_is_begun_when_the_time_is_up(tmp_path):
    file = PartFile(tmp_path / "rows.jsonl")
    file.add({"cell": "one", "status": OK})
    assert run(_Cells(one=OK, two=OK), file, lambda: -1.0, "cpu")
    assert list(file.rows) == ["one"]


def test_a_gpu_in_an_error_state_asks_for_another_process(monkeypatch, tmp_path):
    def illegal(*shape, device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.ones", illegal)
    file = PartFile(tmp_path / "rows.jsonl")
    assert not run(_Cells(one=RuntimeError("CUDA error"), two=OK), file, lambda: 60.0, "cuda")
    assert list(file.rows) == ["one"]


# What is planned.


def test_every_scheme_is_checked_on_every_backend(monkeypatch):
    cases = plan(smoke=False)
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


def test_a_full_run_measures_real_lengths_in_bfloat16(tmp_path):
    price = Price("cuda", False, tmp_path)
    assert price.settings()["dtype"] == "bfloat16"
    assert price.settings()["smollm2"]["num_layers"] == 30
    for length in (1024, 4096, 16384, 32768):
        for cell in ("attention forward", "attention train", "smollm2 decode", "smollm2 decode_batch16"):
            assert f"{cell} {length}" in price.cells()
    study = Study("cuda", False, tmp_path)
    assert study.settings()["hidden_size"] == 512
    assert "causal-alibi-seed0" in study.cells()
    assert any(cell.startswith("pytest tests/attention/") for cell in Correctness("cuda", False, tmp_path).cells())


def test_a_training_stops_when_the_time_is_up_and_goes_on(tmp_path):
    left = iter([1.0, -1.0])
    stopped = Study("cpu", True, tmp_path, {}, lambda: next(left))
    with pytest.raises(OutOfTimeError):
        stopped.run("causal-rope-seed0")
    row = Study("cpu", True, tmp_path).run("causal-rope-seed0")
    assert row["status"] == OK
    assert row["steps"] == row["curve"]["step"][-1] == 2


def test_what_pytest_reports_is_a_row(tmp_path):
    file, report = tmp_path / "test_it.py", tmp_path / "report.xml"
    file.write_text("def test_a(): pass\ndef test_b(): assert 1 == 2")
    words = ["pytest", str(file), "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), f"--junitxml={report}"]
    status = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, check=False).returncode
    counts = {"tests": 2, "failures": 1, "errors": 0, "skipped": 0}
    assert read_report(report, status) == {"status": WRONG, "counts": counts, "reason": "test_b - assert 1 == 2"}
    report.write_text('<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>')
    assert read_report(report, 0) == {"status": OK, "counts": {"tests": 3, "failures": 0, "errors": 0, "skipped": 1}}
    assert read_report(report, 3) == {"status": CRASHED, "reason": "pytest ended with status 3"}
