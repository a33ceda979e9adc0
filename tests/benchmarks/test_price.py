from __future__ import annotations

import json
import math
import pickle
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks import memory, price, profile_scheme
from benchmarks.arguments import parse_options
from benchmarks.errors import BenchmarkError
from benchmarks.figure import draw_price
from benchmarks.memory import measure_here, memory_requests, peak_memory
from benchmarks.table import figure_tables, price_result, write_tables
from benchmarks.timing import Pace
from tests.benchmarks.tiny import TINY, tiny_options

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "results"
#: A run of two cells.
FEW = {"levels": ("model",), "phases": ("forward",), "schemes": ("rope",)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("price")
    return price.measure(tiny_options(folder), "python -m benchmarks.price"), folder


@pytest.fixture
def content(finished):
    """A copy that a test may change."""
    return json.loads(json.dumps(finished[0]))


def test_every_cell_has_ratios(finished):
    content, folder = finished
    written = json.loads((folder / "results.json").read_text())
    assert written == content
    assert set(written["cells"]) == {
        f"{cell} {length}" for cell in ("attention forward", "model forward", "model decode") for length in (16, 32)
    }
    for cell in written["cells"].values():
        rows = {row["subject"]: row for row in cell["rows"]}
        expected = {"bare", "bare again", "stock", "rope", "alibi"}
        expected |= {"normalized_integer"} if cell["phase"] == "forward" else set()
        assert expected <= set(rows)
        assert all(0 < row["to_bare"]["low"] <= row["to_bare"]["high"] < math.inf for row in rows.values())
        assert all("to_stock" in row for row in rows.values())
        assert cell["rounds"] >= 3
    assert written["not_begun"] == []
    decode = written["cells"]["model decode 16"]["left_out"]
    assert decode["normalized_integer"].startswith("refused: ")


def test_finished_cells_are_kept(finished):
    content, folder = finished
    again = price.measure(tiny_options(folder), "python -m benchmarks.price")
    assert again["cells"] == content["cells"]
    assert again["commands"] == ["python -m benchmarks.price"]


def test_a_cell_with_other_subjects_is_measured_anew_and_the_rest_kept(finished, tmp_path):
    content, folder = finished
    (tmp_path / "results.json").write_text((folder / "results.json").read_text())
    again = price.measure(tiny_options(tmp_path, **FEW, lengths=(16,)), "another")
    changed = {key for key, cell in content["cells"].items() if again["cells"][key] != cell}
    assert changed == {"model forward 16"}


def test_a_run_that_is_out_of_time_names_what_is_missing_and_goes_on(tmp_path):
    content = price.measure(tiny_options(tmp_path, **FEW, budget_minutes=-1.0), "first")
    assert content["not_begun"] == ["model forward 16", "model forward 32"]
    assert "- model forward 16: not started within the time budget" in write_tables(content)
    later = price.measure(tiny_options(tmp_path, **FEW), "first")
    assert (later["not_begun"], len(later["cells"])) == ([], 2)


def test_a_killed_run_keeps_its_finished_cells(tmp_path, monkeypatch):
    real = price.time_subjects

    def killed(subjects, phase, length, *rest):
        if length == 32:
            raise KeyboardInterrupt
        return real(subjects, phase, length, *rest)

    monkeypatch.setattr(price, "time_subjects", killed)
    with pytest.raises(KeyboardInterrupt):
        price.measure(tiny_options(tmp_path, **FEW), "first")
    assert list(json.loads((tmp_path / "results.json").read_text())["cells"]) == ["model forward 16"]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("machine", "cpu", "another"), ("settings", "dtype", "bfloat16"), ("machine", "torch", "1")],
)
def test_results_of_elsewhere_are_refused(content, tmp_path, part, name, value):
    content[part][name] = value
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(BenchmarkError, match=rf"{name} '{value}' there.*--overwrite"):
        price.measure(tiny_options(tmp_path), "x")
    assert json.loads((tmp_path / "results.json").read_text()) == content


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"machine": ')
    with pytest.raises(BenchmarkError, match="cannot be read"):
        price.measure(tiny_options(tmp_path), "x")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(BenchmarkError, match="does not contain results"):
        price.measure(tiny_options(tmp_path), "x")


def test_what_was_too_slow_at_one_length_is_not_tried_at_the_next(tmp_path):
    pace = Pace(3, 1.0, subject_seconds=1e-9, measurement_seconds=0.004)
    content = price.measure(tiny_options(tmp_path, **FEW, pace=pace), "x")
    first, second = content["cells"]["model forward 16"], content["cells"]["model forward 32"]
    # A baseline is always timed at the first length, however slow it is.
    assert [row["subject"] for row in first["rows"]] == ["bare"]
    assert first["left_out"]["rope"].startswith("from 16 tokens on: too slow")
    assert second["rows"] == []
    assert second["left_out"]["rope"].startswith("from 16 tokens on: too slow")
    assert "to judge by 16 tokens" in second["left_out"]["bare"]
    assert "`rope`: from 16 tokens on" in write_tables(content)


# "price" and "price_smollm2" were written with other targets.
@pytest.mark.parametrize("name", ["16k", "composed", "decaying", "narrow", "narrow_compiled", "vision"])
def test_the_published_tables_are_those_of_the_published_results(name):
    folder = PUBLISHED / f"price_{name}"
    text = (folder / "table.md").read_text(encoding="utf-8")
    parts = figure_tables(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    assert text.endswith("\n\n".join(filter(None, parts)) + "\n")


def test_the_figure_is_drawn_from_two_lengths_on(content, tmp_path):
    paths = draw_price(price_result(content), tmp_path)
    assert [path.name for path in paths] == ["price.png", "price_dark.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 80_000 for path in paths)
    short = content | {"cells": {key: cell for key, cell in content["cells"].items() if cell["length"] == 16}}
    assert draw_price(price_result(short), tmp_path / "none") == []


class HerePool:
    """In the place of a fresh process, which takes half a minute to begin: what is sent to it and back is pickled."""

    def __init__(self, workers: int, mp_context) -> None:
        assert (workers, mp_context.get_start_method()) == (1, "spawn")

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, *call):
        function, *given = pickle.loads(pickle.dumps(call))
        future: Future = Future()
        try:
            future.set_result(pickle.loads(pickle.dumps(function(*given))))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("pool", [HerePool, pytest.param(ProcessPoolExecutor, marks=pytest.mark.slow)])
def test_memory_is_measured_or_it_is_told_why_not(pool, monkeypatch):
    monkeypatch.setattr(memory, "ProcessPoolExecutor", pool)
    request = {"level": "model", "subject": "rope", "phase": "train", "length": 16, "peers": []}
    peak = peak_memory(request, TINY)
    assert peak["phase_bytes"] >= 0
    assert peak["total_bytes"] == peak["before_bytes"] + peak["phase_bytes"]
    refused = {"level": "encoder", "subject": "xpos", "phase": "forward"}
    assert peak_memory(request | refused, TINY)["reason"].startswith("refused: XposConfig does not support")
    assert "tried to allocate" in peak_memory(request | {"length": 1 << 40}, TINY)["reason"]


def test_memory_grows_with_what_a_call_allocates():
    def phase(length: int) -> int:
        request = {"level": "attention", "subject": "alibi, mask built in each call", "phase": "forward"}
        return measure_here(request | {"length": length, "peers": ["mask"]}, TINY)["phase_bytes"]

    # The mask alone: 4 heads x 2048 x 2048 numbers of four bytes. What is smaller than 32 MiB may lie in memory that an
    # earlier test has freed, which is resident already.
    assert phase(2048) >= 4 * 2048 * 2048 * 4


def test_long_inputs_are_planned_for_few_subjects(tmp_path):
    changes = {"schemes": ("rope", "alibi", "t5", "fire"), "memory_lengths": (4096, 16384)}
    assert all(request["phase"] == "forward" for request in memory_requests(tiny_options(tmp_path, **changes)))
    both = memory_requests(tiny_options(tmp_path, **changes, phases=("forward", "train")))
    long_ones = [request for request in both if request["length"] == 16384]
    assert {(request["level"], request["phase"]) for request in long_ones} == {("model", "train")}
    assert {request["subject"] for request in long_ones} == {"bare", "rope", "alibi", "t5"}
    peers = {"sdpa", "alibi, mask built in each call", "alibi, mask built once"}
    assert {request["subject"] for request in both if request["peers"]} == peers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schemes", "alibbi"], "Did you mean 'alibi'?"),
        (["--schemes", "composed"], "arranges other schemes"),
        (["--rounds", "2"], "at least 3"),
        (["--lengths", "2"], "at least 16"),
        (["--budget_minutes", "0"], "not a number above 0"),
        (["--levels", "modell"], "choose from"),
        (["--levels", "vit", "--lengths", "200"], "200 patches are not a square image"),
        (["--schemes", "alibi:axs=2"], "Did you mean 'axes'"),
        (["--schemes", "alibi@cuda"], "the backend 'cuda' is not one of eager, sdpa"),
    ],
)
def test_options_that_cannot_work_are_told(words, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_options(words)
    assert exit_info.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_device_that_is_not_there_is_told(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for main in (price.main, lambda words: profile_scheme.main(["t5", *words])):
        with pytest.raises(SystemExit) as exit_info:
            main(["--device", "cuda"])
        assert exit_info.value.code == 2
        assert "The device 'cuda' is not available" in capsys.readouterr().err


def test_quick_gives_way_to_what_is_said():
    quick = parse_options(["--quick"])
    assert quick.budget_minutes <= 2.5
    assert parse_options(["--quick", "--lengths", "64", "32", "64"]).lengths == [64, 32, 64]
    assert parse_options([]).schemes is None
    assert parse_options(["--peers"]).peers == []


def test_the_profile_tells_what_a_scheme_adds(capsys, monkeypatch):
    monkeypatch.setattr(profile_scheme, "Setting", lambda device, dtype: TINY)
    assert profile_scheme.main(["t5", "--length", "32", "--phase", "forward", "--calls", "1"]) == 0
    printed = capsys.readouterr().out
    assert "position is" in printed
    assert "aten::" in printed
    assert profile_scheme.main(["xpos", "--level", "encoder", "--length", "32"]) == 2
    assert "refused: XposConfig" in capsys.readouterr().err
