"""The table of the grid of learning rates, on trainings whose losses are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from docs.study import grid
from docs.study.claims import LENGTH
from docs.study.make_pages import FOLDER
from docs.study.significance import holm

#: What each scheme has above RoPE at its best rate, the noise between seeds, and the verdict.
CASES = {
    "kerple": (-0.05, 0.002, "lower"),
    "forget_gate": (0.05, 0.002, "higher"),
    "cope": (0.0005, 0.0005, "equal"),
    "wavelet": (0.0, 0.1, "undecided"),
    "tisa": (0.2, 0.002, "higher"),
    "tupe": (0.3, 0.002, "higher"),
}


def trainings() -> dict[str, list[dict[str, Any]]]:
    drawn = np.random.default_rng(1)
    runs: dict[str, list[dict[str, Any]]] = {study: [] for study in grid.STUDIES.values()}
    for seed in grid.SEEDS:
        rope = 1.5 + drawn.normal(0, 0.05)
        for scheme in grid.SCHEMES:
            shift, noise, _ = CASES.get(scheme, (0.0, 0.0, ""))
            loss = rope + shift + drawn.normal(0, 1) * noise
            for rate, study in grid.STUDIES.items():
                # The middle rate is the best one, for kerple the highest.
                worse = 0.3 * (rate != (4e-3 if scheme == "kerple" else 2e-3))
                reading = {"lengths": [LENGTH], "tail_loss": [loss + worse], "window_tail_loss": [[loss + worse] * 2]}
                runs[study].append(
                    {"task": "causal", "scheme": scheme, "seed": seed, "status": "finished", "by_length": reading,
                     "curve": {"validation_loss": [4.0, loss + worse]}}
                )  # fmt: skip
    return runs


def rows_of(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_each_scheme_keeps_its_best_rate_and_is_compared_with_rope() -> None:
    runs = trainings()
    rows = rows_of(grid.grid_table(runs))
    assert {scheme: rows[scheme][-1] for scheme in CASES} == {scheme: case[-1] for scheme, case in CASES.items()}
    assert rows["kerple"][3] == "0.004 (at the edge)"
    assert rows["cope"][3] == rows["rope"][3] == "0.002"
    tails = {
        scheme: [run["by_length"]["tail_loss"][0] for run in runs[grid.STUDIES[best]] if run["scheme"] == scheme]
        for scheme, best in (dict.fromkeys(grid.SCHEMES, 2e-3) | {"kerple": 4e-3}).items()
    }
    from scipy import stats

    expected = holm([float(stats.ttest_rel(tails[scheme], tails["rope"]).pvalue) for scheme in CASES])
    assert [float(rows[scheme][-2]) for scheme in CASES] == pytest.approx(expected, abs=6e-4)


def test_a_rate_with_which_a_training_diverged_is_not_chosen() -> None:
    runs = trainings()
    broken = next(run for run in runs["reference_grid_2e-3"] if run["scheme"] == "rope")
    broken["status"] = "diverged"
    assert rows_of(grid.grid_table(runs))["rope"][1] == "diverged"


def test_the_settings_are_those_of_the_protocol() -> None:
    settings = yaml.safe_load((FOLDER / "settings" / "reference_grid.yaml").read_text(encoding="utf-8"))
    assert (settings["schemes"], settings["seeds"]) == (list(grid.SCHEMES), list(grid.SEEDS))
    assert settings["train_length"] == LENGTH
    protocol = (FOLDER / "protocol.md").read_text(encoding="utf-8")
    assert "0.001, 0.002 and 0.004 | 0 to 4" in protocol
