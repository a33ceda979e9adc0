"""A study of image classifiers, with learning rates that are chosen alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import AutoModelForImageClassification

from tests.training.run_cases import REPOSITORY, study_words
from training import compare
from training.errors import SettingsError
from training.study.cells import study_cells
from training.study.rates import rates_study, with_chosen_rates
from training.study.settings import StudySettings, parse_study, validated
from training.study.tasks.images import pictures_summary


def arguments(folder: Path, **changes: Any) -> list[str]:
    options: dict[str, Any] = {
        "dataset_name": None, "tasks": "images", "schemes": "none,rope_nd,short", "seeds": "0",
        "scheme_options": {"short": {"scheme": "learned", "num_positions": 70}}, "learning_rates": "[1e-2, 1e-3]",
        "max_steps": 3, "eval_every": 3, "batch_size": 8, "train_length": None, "eval_windows": None,
        "validation_fraction": None, "train_resolution": 16, "test_resolutions": "12,16,48", "max_train_samples": 32,
        "max_eval_samples": 20, "save_models": "true",
    }  # fmt: skip
    return study_words(folder, folder, **(options | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "out"
    assert compare.main(arguments(folder)) == 0
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((finished / "results.json").read_text())
    return content


@pytest.mark.long
def test_every_model_is_read_at_every_resolution_that_its_scheme_can(results: dict[str, Any]) -> None:
    assert results["tasks"]["images"]["lengths"] == [12, 16, 48]
    assert results["versions"]["scikit-learn"]
    assert results["tasks"]["images"]["pictures"]["test_pictures"] == 20
    for training in results["runs"]:
        assert training["status"] == "finished"
        reading = training["by_resolution"]
        assert all(0 <= value <= 1 for value in reading["accuracy"][:2])
        assert (reading["accuracy"][2] is None) == (training["scheme"] == "short")
        assert training["dog"]["told_apart"] == (training["scheme"] != "none")
        assert len(training["curve"]["validation_accuracy"]) == len(training["curve"]["step"])


def test_the_rate_of_each_scheme_is_the_one_with_the_lowest_validation_loss(
    finished: Path, results: dict[str, Any]
) -> None:
    tried = json.loads((finished.with_name("out_rates") / "results.json").read_text())
    assert {run["seed"] for run in tried["runs"]} == {1}
    losses = {run["scheme"]: run["curve"]["validation_loss"][-1] for run in tried["runs"]}
    assert len(losses) == 6
    for label in ("none", "rope_nd", "short"):
        best = min((1e-2, 1e-3), key=lambda rate: losses[f"{label}-{rate:g}"])
        assert {run["training"]["learning_rate"] for run in results["runs"] if run["scheme"] == label} == {best}


def test_tables_figures_and_cards_speak_of_resolutions(finished: Path) -> None:
    table = (finished / "table.md").read_text()
    for words in (
        "12 pixels (%)",
        "At 16 pixels, the resolution of training",
        "Accuracy by resolution",
        "two equal dogs",
    ):
        assert words in table
    assert "48 pixels: A sequence of length 145" in table
    assert "perplexity" not in table.lower()
    assert (finished / "plots/images_accuracy_by_resolution.png").is_file()
    card = (finished / "models/images-rope_nd-seed0/README.md").read_text()
    assert "trained to classify pictures" in card
    assert "Accuracy at 48 pixels" in card
    assert "| trained resolutions | 16 |" in card
    model = AutoModelForImageClassification.from_pretrained(finished / "models/images-rope_nd-seed0")
    assert model.position_encoding.config.name == "rope_nd"


def test_other_pictures_are_another_study(finished: Path, capsys: Any) -> None:
    assert compare.main(arguments(finished, learning_rates="[]", split_seed=1)) == 2
    assert "pictures digest was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 5}, "A picture of 32 pixels is not a whole number of patches of 5"),
        ({"model_name_or_path": "some/model"}, "run_image_classification.py"),
        (
            {"schemes": "a,b", "scheme_options": {"a": {"scheme": "none"},
                                                  "b": {"scheme": "alibi", "from": "a", "swap": {"distill": True}}}},
            "'images' does not support swap options",
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(options: dict[str, Any], message: str) -> None:
    study = validated(StudySettings, {"tasks": "images"} | options, "The study")
    with pytest.raises(ValueError, match=message):
        compare._prepare(study, study_cells(study), None, SimpleNamespace(is_main_process=False))


def test_schemes_with_a_rate_of_their_own_are_left_alone() -> None:
    options = {"alibi": {"training": {"learning_rate": 0.5}}, "on": {"scheme": "rope", "from": "alibi"}}
    given = {"learning_rates": [0.1, 0.2], "scheme_options": options, "tasks": ["causal"]}
    given |= {"schemes": ["sinusoidal", "alibi", "on"]}
    study = validated(StudySettings, given, "The study")
    tried = rates_study(study)
    assert tried.schemes == ["sinusoidal-0.1", "sinusoidal-0.2"]
    # With the options that the study would use.
    assert {cell.options["scale"] for cell in study_cells(tried)} == {0.07}
    runs = [
        {"task": "causal", "scheme": "sinusoidal-0.1", "curve": {"validation_loss": [4.0, 3.0]}},
        {"task": "causal", "scheme": "sinusoidal-0.2", "curve": {"validation_loss": [5.0, 2.0]}},
    ]
    chosen = with_chosen_rates(study, {"runs": runs})
    assert chosen.options_of("sinusoidal", "causal").training == {"learning_rate": 0.2}
    assert chosen.options_of("alibi", "causal").training == {"learning_rate": 0.5}
    tasks = {"task_options": {"copy": {"schemes": ["alibi"], "seeds": [5]}}, "tasks": ["causal", "copy"]}
    assert rates_study(validated(StudySettings, given | tasks, "The study")).tasks == ["causal"]
    tasks["task_options"]["copy"] = {"learning_rate": 0.3}
    settings = validated(StudySettings, given | tasks, "The study")
    assert rates_study(settings).tasks == ["causal"]
    only = validated(StudySettings, given | {"schemes": ["alibi", "on"]}, "The study")
    with pytest.raises(SettingsError, match="--learning_rates are for schemes"):
        rates_study(only)


def test_every_task_chooses_its_own_rate() -> None:
    given = {"learning_rates": [0.1, 0.2], "schemes": ["t5", "rope"], "tasks": ["copy", "reverse"], "seeds": [1]}
    options = {"reverse": {"scheme_options": {"t5": {"max_distance": 40, "training": {"warmup_steps": 7}}}}}
    study = validated(
        StudySettings, given | {"task_options": options, "scheme_options": {"t5": {"bidirectional": False}}}, ""
    )
    tried = {(cell.task.name, cell.label): cell for cell in study_cells(rates_study(study))}
    assert len(tried) == 2 * 2 * 2
    assert tried["reverse", "t5-0.1"].options == {"bidirectional": False, "max_distance": 40}
    assert tried["copy", "t5-0.1"].options == {"bidirectional": False}
    losses = {("copy", "t5-0.1"): 1.0, ("copy", "t5-0.2"): 2.0, ("reverse", "t5-0.1"): 4.0, ("reverse", "t5-0.2"): 3.0}
    losses |= {(task, f"rope-{rate}"): 1.0 + rate for task in study.tasks for rate in (0.1, 0.2)}
    runs = [
        {"task": task, "scheme": label, "curve": {"validation_loss": [loss]}} for (task, label), loss in losses.items()
    ]
    chosen = with_chosen_rates(study, {"runs": runs})
    rates = {(cell.task.name, cell.label): cell.settings.learning_rate for cell in study_cells(chosen)}
    assert rates == {
        ("copy", "t5"): 0.1, ("reverse", "t5"): 0.2, ("copy", "rope"): 0.1, ("reverse", "rope"): 0.1,
    }  # fmt: skip
    assert {cell.settings.warmup_steps for cell in study_cells(chosen) if cell.task.name == "reverse"} == {7, 50}
    for diverged in runs:
        if diverged["scheme"].startswith("t5") and diverged["task"] == "copy":
            diverged["curve"] = {}
    with pytest.raises(SettingsError, match="for 't5' in the task 'copy'"):
        with_chosen_rates(study, {"runs": runs})


def test_the_study_of_the_results_page() -> None:
    path = REPOSITORY / "training/studies/images.yaml"
    study = parse_study([str(path)], "")
    assert len(study.seeds) >= 3
    assert {cell.config.name for cell in study_cells(study)} == {
        "learned", "sinusoidal", "rope_nd", "alibi", "none",
    }  # fmt: skip
    assert yaml.safe_load(path.read_text())["output_dir"] == "outputs/images"
    assert len(pictures_summary(study)["digest"]) == 16
