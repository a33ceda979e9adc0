from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.training.run_cases import run, study_words, words, write_texts
from training.report import outputs
from training.study.corpus import study_tokenizer
from training.study.settings import StudySettings


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight documents of a few hundred bytes, each different."""
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def alibi(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of run_clm with ALiBi, which no test changes."""
    output = tmp_path_factory.mktemp("runs") / "alibi"
    assert run(words(texts, output, scheme="alibi", eval_strategy="steps", eval_steps=6)) == 0
    return output


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The bytes of ByT5, with a mask token."""
    return study_tokenizer(StudySettings())


@pytest.fixture
def tiny(texts: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a comparison in `tmp_path / "out"` that takes seconds."""
    return functools.partial(study_words, texts, tmp_path / "out")


@pytest.fixture(scope="module")
def no_figures():
    """Figures take longer than a training; test_study_outputs.py checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "draw_figures", lambda *_: [])
        yield
