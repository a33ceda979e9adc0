"""The supervisor of the GPU kit with stand-in workers that crash, hang and give up."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.gpu import supervisor
from benchmarks.gpu.arguments import Options, parse_options
from benchmarks.gpu.store import Store, cells_left
from benchmarks.gpu.supervisor import Supervisor

#: Runs the cells of the part that have no row; what a cell does is in its name.
_WORKER = """
import json, os, pathlib, signal, sys, time
request = json.loads(sys.argv[1])
def tell(**words):
    print(chr(30) + json.dumps(words), flush=True)
tell(event="machine", machine={"cpu": "a processor"}, subnormals=1.0, missing={"pytest": "no suites"})
print("a line of some library")
part = request["parts"][0]
known = json.loads(pathlib.Path(request["results"]).read_text())["parts"].get(part, {}).get("rows", {})
cells = ["one", "killed", "hangs", "leaves", "two"]
tell(event="part", part=part, settings={}, cells=cells)
for cell in cells:
    if cell in known:
        continue
    tell(event="begin", cell=cell)
    if cell == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    if cell == "hangs":
        time.sleep(600)
    tell(event="row", cell=cell, row={"status": "ok", "seconds": 0.0})
    if cell == "leaves":
        sys.exit(75)
tell(event="end", part=part)
"""


@pytest.fixture
def options(tmp_path) -> Options:
    return dataclasses.replace(parse_options(["--parts", "price", "--output_dir", str(tmp_path)]), cell_seconds=2.0)


def _worker(folder: Path, code: str) -> list[str]:
    path = folder / "worker.py"
    path.write_text(textwrap.dedent(code))
    return [sys.executable, str(path)]


def test_what_crashes_hangs_or_gives_up_costs_one_cell(options, tmp_path):
    told: list[str] = []
    store = Store(tmp_path)
    Supervisor(options, store, told.append, _worker(tmp_path, _WORKER)).run()
    rows = Store(tmp_path).rows("price")
    assert {cell: row["status"] for cell, row in rows.items()} == {
        "one": "ok",
        "killed": "crashed",
        "hangs": "crashed",
        "leaves": "ok",
        "two": "ok",
    }
    assert rows["killed"]["reason"] == "the process ended with signal 11 in the middle of this cell"
    assert rows["hangs"]["reason"] == "it did not end within 2 s"
    assert "a line of some library" in told
    assert "pytest is not installed: no suites" in told
    assert store.content["parts"]["price"]["machine"] == {"cpu": "a processor"}


def test_a_part_whose_time_is_up_is_ended_and_goes_on_with_the_next_call(options, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_GRACE", 0.5)
    # Of a time as short as this, none is enough to say that a cell hangs.
    monkeypatch.setattr(supervisor, "_ENOUGH", 10.0)
    late = _WORKER.replace('if cell == "hangs":', 'if cell == "two":\n        time.sleep(60)\n    if cell == "hangs":')
    late = late.replace("time.sleep(600)", "pass").replace("os.kill(os.getpid(), signal.SIGSEGV)", "time.sleep(1)")
    told: list[str] = []
    timed = dataclasses.replace(options, budget_seconds=2.0, cell_seconds=60.0)
    store = Store(tmp_path)
    Supervisor(timed, store, told.append, _worker(tmp_path, late)).run()
    assert cells_left(store.content["parts"]["price"]) == ["two"]
    assert any("1 cells are left" in line for line in told)
    Supervisor(options, Store(tmp_path), told.append, _worker(tmp_path, _WORKER)).run()
    assert cells_left(Store(tmp_path).content["parts"]["price"]) == []


def test_a_worker_that_cannot_begin_is_an_error(options, tmp_path):
    with pytest.raises(BenchmarkError, match="ended with status 3 before it began a cell"):
        Supervisor(options, Store(tmp_path), print, _worker(tmp_path, "import sys; sys.exit(3)")).run()


def test_the_reason_of_a_worker_is_the_error(options, tmp_path):
    code = "import json\nprint(chr(30) + json.dumps({'event': 'fatal', 'reason': 'no GPU'}))"
    with pytest.raises(BenchmarkError, match="no GPU"):
        Supervisor(options, Store(tmp_path), print, _worker(tmp_path, code)).run()


def test_results_of_something_else_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"machine": {}}')
    with pytest.raises(BenchmarkError, match="does not hold results"):
        Store(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(BenchmarkError, match="cannot be read"):
        Store(tmp_path)
