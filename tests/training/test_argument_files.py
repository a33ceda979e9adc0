"""Options from files: how values are read, and the errors for those that cannot be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from training.argument_files import parse_arguments, parse_structured
from training.arguments import DataArguments, ModelArguments, SchemeArguments
from training.errors import SettingsError

TYPES = (ModelArguments, SchemeArguments, DataArguments, TrainingArguments)


def parse(*words: str) -> tuple[Any, ...]:
    return parse_arguments(TYPES, words)


def test_numbers_as_people_write_them() -> None:
    assert parse_structured('{"theta": 5e5}', "x") == {"theta": 500000.0}
    assert parse_structured("{theta: 5e5, a: -1e-4, b: 1_0e2, c: e5, d: 1.5e3}", "x") == {
        "theta": 500000.0, "a": -1e-4, "b": 1000.0, "c": "e5", "d": 1500.0,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_and_the_same_flags_are_the_same(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"settings.{suffix}"
    content = {
        "model_type": "llama", "scheme": ["native", "kerple"], "streaming": False,
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "learning_rate": 2e-4, "max_eval_samples": None, "output_dir": "x", "use_cpu": True,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    flags = (
        "--model_type", "llama", "--scheme", '["native", "kerple"]', "--lr_scheduler_kwargs", '{"num_cycles": 2}',
        "--learning_rate", "2e-4", "--output_dir", "x", "--use_cpu",
    )  # fmt: skip
    for ours, theirs in zip(parse(str(path)), parse(*flags), strict=True):
        assert str(ours) == str(theirs)


def test_a_flag_takes_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model_type: llama\noutput_dir: x\nseed: 1\nstreaming: true\nmax_train_samples: 3\n")
    _, _, data, trainer = parse(str(path), "--seed", "2", "--streaming", "false")
    assert (trainer.seed, data.streaming, data.max_train_samples) == (2, False, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle_type: llama", "Unknown option --modle_type in .*Did you mean --model_type"),
        ("- a", "contains list; expected one mapping"),
        ("a: [", "is not YAML"),
        ("run_name: 2020-13-45", "is not YAML: month must be"),
        ("model_type: llama\nreport_to: [a, b]", "takes one tracker"),
    ],
)
def test_files_that_say_nothing_usable(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        parse(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Cannot read the settings"):
        parse(str(tmp_path / "none.yaml"))
    with pytest.raises(SettingsError, match=r"A settings file .* must come first"):
        parse("--model_type", "llama", "settings.yaml")


@dataclass
class _Pinning:
    dataloader_pin_memory: bool = True


def test_memory_is_pinned_only_where_an_accelerator_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (False, True):
        monkeypatch.setattr("torch.accelerator.is_available", lambda available=available: available)
        assert parse_arguments([_Pinning], [])[0].dataloader_pin_memory is available
        assert parse_arguments([_Pinning], ["--dataloader_pin_memory", "true"])[0].dataloader_pin_memory is True
