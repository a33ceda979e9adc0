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

SENTENCES = (
    "The ship left the harbour before dawn, and nobody on the quay saw it go. ",
    "A letter came for the captain, who was already far beyond the reach of any letter. ",
    "In the evening the wind turned, and with the wind the mood of the whole town. ",
    "Nobody spoke of the ship again until the winter, when a sail was seen from the tower. ",
)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """Eight documents of a few hundred bytes, each different."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(8):
        order = SENTENCES[index % 4 :] + SENTENCES[: index % 4]
        (folder / f"document{index}.txt").write_text("".join(order) * (index + 2), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight other documents, for runs."""
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
def tiny(text_folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a comparison in `tmp_path / "out"` that takes seconds."""
    return functools.partial(study_words, text_folder, tmp_path / "out")


@pytest.fixture(scope="module")
def no_figures():
    """Figures take longer than a training; test_study_outputs.py checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "draw_figures", lambda *_: [])
        yield
