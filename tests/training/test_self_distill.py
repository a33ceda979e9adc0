"""Self-distillation with perturbed positions in the training scripts and studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.training.run_cases import (
    CONFIGS,
    REPOSITORY,
    SIZES,
    curve,
    launch,
    losses,
    run,
    study_runs,
    study_words,
    words,
)
from training import compare


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_a_run_distils_itself(packing: str, texts: Path, tmp_path: Path) -> None:
    found = {}
    for name, options in (("plain", {}), ("self", {"self_distill": "true"})):
        folder = tmp_path / name
        # Large enough for positions to matter at the first step.
        sizes = json.dumps(SIZES | {"initializer_range": 0.3})
        common = {"scheme": "rope", "packing": packing, "max_steps": 4, "config_overrides": sizes}
        assert run(words(texts, folder, **common, **options)) == 0
        found[name] = losses(folder)
        assert AutoModelForCausalLM.from_pretrained(folder).position_encoding.config.name == "rope"
    assert found["self"][0] > found["plain"][0]
    assert len(found["self"]) == 4
    recorded = json.loads((tmp_path / "self/run_settings.json").read_text())
    assert recorded["healing.self_distill"] is True
    assert "healing.self_distill" not in json.loads((tmp_path / "plain/run_settings.json").read_text())


def test_a_run_that_could_not_learn_it_says_why(texts: Path, tmp_path: Path, capsys: Any) -> None:
    short = {"scheme": "learned", "scheme_options": '{"num_positions": 32}'}
    for changes, message in (({"scheme": "none"}, "has no effect"), (short, "reach 32")):
        options = {"packing": "concatenate", "max_steps": 2, "self_distill": "true"} | changes
        assert run(words(texts, tmp_path / message, **options)) == 2
        assert message in capsys.readouterr().err


def test_a_study_with_and_without(texts: Path, tmp_path: Path, no_figures: None, capsys: Any) -> None:
    schemes = {
        "base": {"scheme": "rope"},
        "control": {"scheme": "rope", "from": "base"},
        "self": {"scheme": "rope", "from": "base", "swap": {"self_distill": True, "self_distill_weight": 1000.0}},
        "cyclic": {"scheme": "t5", "from": "base", "swap": {"self_distill": True, "self_distill_shift": "cyclic"}},
        "none": {"from": "base", "swap": {"self_distill": True}},
    }
    options = {"schemes": ",".join(schemes), "scheme_options": schemes, "length_factor": 2, "warmup_steps": 0}
    words = study_words(texts, tmp_path / "out", **options, max_steps=3, eval_every=3)
    assert compare.main(words) == 0, capsys.readouterr().err
    runs = {run["scheme"]: run for run in study_runs(tmp_path / "out").values()}
    assert runs["none"]["status"] == "unsupported"
    assert "has no effect" in runs["none"]["reason"]
    assert all(runs[name]["status"] == "finished" for name in ("control", "self", "cyclic"))
    assert runs["self"]["curve"]["train_loss"][-1] > runs["control"]["curve"]["train_loss"][-1]
    assert compare.main(study_words(texts, tmp_path / "out", **options, tasks="masked")) == 2
    assert "it is for the task 'causal'" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_learn_what_one_does(texts: Path, tmp_path: Path) -> None:
    """A cyclic shift of two tokens has one outcome, so all processes draw the same positions."""
    common: dict[str, Any] = {
        "scheme": "learned", "config_overrides": json.dumps(SIZES), "block_size": 2, "packing": "concatenate",
        "max_steps": 3, "self_distill": "true", "self_distill_shift": "cyclic",
    }  # fmt: skip
    assert run(words(texts, tmp_path / "alone", per_device_train_batch_size=8, **common)) == 0
    # The launcher's config alone says that they use the CPU.
    both = words(texts, tmp_path / "both", per_device_train_batch_size=4, use_cpu=None, **common)
    launch(CONFIGS / "ddp_cpu.yaml", REPOSITORY / "training/run_clm.py", both)
    for left, right in zip(curve(tmp_path / "alone"), curve(tmp_path / "both"), strict=True):
        assert left.get("loss", 0) == pytest.approx(right.get("loss", 0), rel=1e-4)
