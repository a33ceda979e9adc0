"""The supervisor of the GPU kit with stand-in workers that crash, hang and give up."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError
from tests.kits.gpu.__main__ import parse_options, run_part
from tests.kits.gpu.rows import PartFile

#: Runs the cells of the part that have no row; what a cell does is in its name.
_WORKER = """
import faulthandler, json, os, pathlib, signal, sys, time
from tests.kits.gpu.rows import PartFile
request = json.loads(sys.argv[1])
file = PartFile(pathlib.Path(request["path"]))
cells = ["one", "killed", "hangs", "leaves", "two"]
file.add({"machine": {}, "settings": {}, "cells": cells})
for cell in cells:
    if cell in file.rows:
        continue
    file.add({"cell": cell, "status": "started", "cut_short": request["cell_seconds"] > request["seconds"]})
    faulthandler.dump_traceback_later(min(request["cell_seconds"], request["seconds"]), exit=True)
    if cell == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    if cell == "hangs":
        time.sleep(600)
    file.add({"cell": cell, "status": "ok"})
    if cell == "leaves":
        sys.exit(75)
"""


def run(folder: Path, code: str, *words: str) -> None:
    path = folder / "worker.py"
    path.write_text(textwrap.dedent(code))
    options = parse_options(["--output_dir", str(folder), *words])
    run_part("price", options, "python -m tests.kits.gpu", [sys.executable, str(path)])


def test_what_crashes_hangs_or_gives_up_costs_one_cell(tmp_path, capfd):
    run(tmp_path, _WORKER, "--cell_minutes", "0.02")
    rows = PartFile(tmp_path / "price.jsonl").rows
    assert {cell: row["status"] for cell, row in rows.items()} == {
        "one": "ok",
        "killed": "crashed",
        "hangs": "crashed",
        "leaves": "ok",
        "two": "ok",
    }
    assert rows["killed"]["reason"] == "the process ended with signal 11"
    assert rows["hangs"]["reason"] == "it did not end within 1.2 s"
    assert "line 16 in <module>" in capfd.readouterr().err


def test_a_part_whose_time_is_up_is_ended_and_goes_on_with_the_next_call(tmp_path, capsys):
    run(tmp_path, _WORKER.replace("SIGSEGV", "SIGCONT"), "--cell_minutes", "0.05", "--budget_minutes", "0.04")
    # A cell that did not have all of its time has no row.
    assert PartFile(tmp_path / "price.jsonl").left == ["hangs", "leaves", "two"]
    assert "3 cells are left; the same command goes on with them" in capsys.readouterr().err
    run(tmp_path, _WORKER.replace("time.sleep(600)", "pass"))
    assert PartFile(tmp_path / "price.jsonl").left == []


def test_a_worker_that_cannot_begin_is_an_error(tmp_path):
    with pytest.raises(BenchmarkError, match="ended with status 3 before it began a cell"):
        run(tmp_path, "import sys; sys.exit(3)")
    # The cell that an earlier run was interrupted in is not at fault.
    PartFile(tmp_path / "price.jsonl").add({"cell": "one", "status": "started", "cut_short": False})
    with pytest.raises(BenchmarkError, match="ended with status 3 before it began a cell"):
        run(tmp_path, "import sys; sys.exit(3)")


def test_a_worker_that_has_told_why_nothing_can_be_run_ends_the_run(tmp_path):
    with pytest.raises(BenchmarkError, match="'price' cannot be run"):
        run(tmp_path, "import sys; sys.exit(2)")


def test_the_next_line_replaces_one_that_was_cut_off(tmp_path):
    path = tmp_path / "price.jsonl"
    path.write_text('{"machine": {}, "cells": ["one", "two"]}\n{"cell": "one", "status": "ok"}\n{"cell": "tw')
    file = PartFile(path)
    assert file.left == ["two"]
    file.add({"cell": "two", "status": "ok"})
    assert PartFile(path).left == []


@pytest.mark.parametrize("line", ["not JSON", "[]", '{"text": "a data set"}'])
def test_a_file_with_something_else_is_refused(tmp_path, line):
    path = tmp_path / "price.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(BenchmarkError, match="cannot be read"):
        PartFile(path)
    assert path.read_text() == f"{line}\n"
