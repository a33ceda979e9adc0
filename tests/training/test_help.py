"""The help of the training scripts fits on a screen or two, and `--help-all` has everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from training import compare, run_clm, run_image_classification, run_mlm
from training.arguments import SchemeArguments
from training.study.settings import StudySettings

TRAINER = [field.name for field in fields(TrainingArguments) if field.init]
SCHEME = [field.name for field in fields(SchemeArguments)]
#: What `--help` of a script has, and what `--help-all` has beyond.
SCRIPTS = {
    "run_clm": (run_clm.main, SCHEME, TRAINER),
    "run_mlm": (run_mlm.main, SCHEME, TRAINER),
    "run_image_classification": (run_image_classification.main, SCHEME, TRAINER),
    "compare": (compare.main, list(StudySettings.model_fields), []),
}


def printed(main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_fits_and_help_all_is_complete(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main, own, further = SCRIPTS[name]
    short = printed(main, ["--help"], capsys)
    assert len(short.splitlines()) <= 110
    assert max(map(len, short.splitlines())) <= 120
    assert "--help-all" in short
    assert [option for option in own if f"  --{option}" not in short] == []
    assert "  --adam_beta1" not in short
    complete = printed(main, ["--help-all"], capsys)
    assert [option for option in own + further if f"  --{option}" not in complete] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unknown_option_is_named_before_anything_that_is_missing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SCRIPTS[name][0](["--modle_type", "bert"]) == 2
    message = capsys.readouterr().err
    assert "Unknown option --modle_type in the command line. Did you mean --model_type" in message
    assert "--help-all lists every option." in message
