"""The table and the figures, from results written by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hf_posenc.plots.curves import plot_comparison
from hf_posenc.plots.style import line_style
from training.report import format_tables


def finished(task: str, scheme: str, **changes: Any) -> dict[str, Any]:
    return {
        "task": task,
        "scheme": scheme,
        "options": {},
        "notes": [],
        "parameters": 1234,
        "status": "finished",
        "seconds": 12.4,
        "curve": {"step": [1, 2], "train_loss": [3.0, 2.5], "validation_loss": [3.1, 2.6]},
        "by_length": {
            "lengths": [16, 32],
            "loss": [2.5, 2.75],
            "tail_loss": [2.25, None],
            "tail_tokens": 8,
            "position_edges": [0, 16, 32],
            "position_loss": [2.5, None],
        },
        "dog": {"layers": [0.0, 0.125], "probe": 3e-7, "told_apart": True},
    } | changes


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "settings": {"train_length": 16, "max_steps": 2, "batch_size": 4, "tasks": "causal,masked", "num_layers": 1},
        "lengths": [16, 32],
        "tail_tokens": 8,
        "evaluation_tokens": 320,
        "unigram_cross_entropy": 3.125,
        "trainings": [
            finished("causal", "rope", options={"theta": 100.0}),
            {"task": "causal", "scheme": "t5", "options": {}, "status": "unsupported", "reason": "It cannot be."},
            finished("masked", "none", notes=["Careful."], dog={"error": "No dog in this vocabulary."}),
        ],
    }


def test_table(results):
    table = format_tables(results)
    rope = next(line for line in table.splitlines() if line.startswith("| rope"))
    cells = [cell.strip() for cell in rope.strip("|").split("|")]
    assert cells == ["rope (theta=100.0)", "2.500", "2.750", "2.250", "-", "0.12", "0", "1,234", "12"]
    assert "- `t5` unsupported: It cannot be." in table
    assert "- `none`: Careful." in table
    assert "- `none`, dog test: No dog in this vocabulary." in table
    assert "token frequencies only: 3.125" in table


def test_plots_leave_out_what_did_not_finish(results, tmp_path):
    paths = plot_comparison(results, tmp_path)
    assert len(paths) == 10
    svg = (tmp_path / "loss_by_length.svg").read_text()
    assert ">rope<" in svg
    assert ">t5<" not in svg


def test_no_plots_without_a_finished_training(results, tmp_path):
    results["trainings"] = results["trainings"][1:2]
    assert plot_comparison(results, tmp_path / "plots") == []
    assert "unsupported" in format_tables(results)


def test_drawing_leaves_matplotlib_as_it_was(results, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_comparison(results, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_no_two_schemes_of_a_figure_look_the_same():
    schemes = ["none", "rope", "alibi", *(f"scheme{index}" for index in range(20))]
    looks = [str(line_style(scheme, schemes)) for scheme in schemes]
    assert all(first != second for first, second in itertools.combinations(looks, 2))
    assert line_style("rope", ["rope"]) == line_style("rope", schemes)
