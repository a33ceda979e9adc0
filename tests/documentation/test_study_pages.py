"""The tables of docs/study are those of its raw runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.study import make_pages as study, measured
from docs.study.claims import CLAIMS, read_runs

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_of_the_pages_are_up_to_date() -> None:
    """The runs have schemes that diverged, several processors, and studies of which seeds are missing."""
    tables = study.tables_of(read_runs(study.RUNS))
    placed: list[str] = []
    for name in study.PAGES:
        page = (study.FOLDER / name).read_text(encoding="utf-8")
        assert study.filled(page, tables) == page, "Run: python docs/study/make_pages.py --no-draw"
        placed += re.findall(r"<!-- table: (\w+) -->", page)
    assert sorted(placed) == sorted(study.TABLES)


def test_without_runs_every_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    for name, table in study.TABLES.items():
        if name == "diverged":
            assert table({}) == "None."
        elif name == "claims":
            assert table({}).count("not run") == len(CLAIMS) + sum(len(claim.tests) for claim in CLAIMS)
        else:
            assert table({}) == study.NOT_RUN


def test_the_examples_of_the_raw_runs_give_the_numbers_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "study" / "results.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(ROOT)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
        shown = re.findall(r"^(.+?)  # (\[.*?\]|[\d.]+)", block, flags=re.MULTILINE)
        assert shown
        for expression, number in shown:
            assert eval(expression, scope) == pytest.approx(ast.literal_eval(number), abs=5e-4)


def test_swaps_that_diverged_or_were_not_run_leave_the_rest() -> None:
    def run(label: str, seed: int, loss: float, status: str = "finished") -> dict[str, object]:
        losses = [loss] * len(study.LENGTHS)
        reading = {"lengths": list(study.LENGTHS), "loss": losses, "tail_loss": losses}
        reading["window_tail_loss"] = [[loss, loss]] * len(losses)
        named = {"task": "causal", "scheme": label, "seed": seed, "status": status, "reason": ""}
        return named | {"by_length": reading, "before": reading}

    runs = [run("rope-slow", seed, 1.2) for seed in (0, 1)] + [run("alibi-slow", 0, 2.0)]
    runs += [run("alibi-fast", seed, 9.0, "diverged") for seed in (0, 1)] + [run("none-fast", 3, 2.5)]
    lines = study.TABLES["heal"]({"reference_heal": runs}).splitlines()[2:]
    rows = {line.split(" | ")[0]: line.split(" | ") for line in lines}
    # One seed has no interval, and no seed of the control nothing to compare with.
    assert rows["| `alibi`"][2:5] == ["2.000", "", "+0.800"]
    assert rows["| `none`"][2:5] == ["", "2.500", ""]
