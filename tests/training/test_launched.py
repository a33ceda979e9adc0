"""Scripts that are started as several processes: one writes and prints, or all refuse."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from tests.training.run_cases import REPOSITORY, refused
from training import compare
from training.errors import SettingsError
from training.machine import launched_on_cpu
from training.one_run import exit_status
from training.trainer import SavingError

NO_EVALUATION = ("packaged_models", "launched_script")
EVALUATIONS = sorted(path for path in (REPOSITORY / "eval").glob("*.py") if path.stem not in NO_EVALUATION)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for the second of two on the CPU; both are alone."""
    PartialState()  # Before the variables: with them it would wait for the other process.
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch, second: None) -> None:
    assert launched_on_cpu()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not launched_on_cpu()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not launched_on_cpu()


def test_a_comparison_of_processes_that_are_alone_is_refused(
    tiny: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, second: None
) -> None:
    assert compare.main(tiny()) == 2
    assert capsys.readouterr().err == ""  # The first process says it.
    monkeypatch.setenv("RANK", "0")
    said = refused(capsys, compare.main, tiny())
    assert "2 processes were launched, but they did not form a group" in said
    assert "accelerate launch" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", EVALUATIONS, ids=lambda path: path.stem)
def test_the_second_process_leaves_an_evaluation_to_the_first(
    script: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, second: None
) -> None:
    """Whoever read these words would not end with status 0."""
    monkeypatch.setattr(sys, "argv", [str(script), "--no-such-option"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == ""


def test_what_one_process_alone_finds_is_told_by_that_process(capsys: Any, monkeypatch: Any) -> None:
    def settings() -> None:
        raise SettingsError("no such thing")

    def saving() -> None:
        raise SavingError("rng_state_1.pth could not be written")

    monkeypatch.setenv("RANK", "1")
    assert exit_status("run_clm", settings) == 2  # the first process says the same
    assert capsys.readouterr().err == ""
    assert exit_status("run_clm", saving) == 1
    assert capsys.readouterr().err == "run_clm (process 1): rng_state_1.pth could not be written\n"
