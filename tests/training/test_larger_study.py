"""The larger size of the reference study, and the tools that it needs: a tokenizer and a corpus of another kind."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from docs.study import python_source, train_tokenizer
from tests.models import word_tokenizer
from tests.training.run_cases import refused, study_runs, study_words
from training import compare, search_spectrum
from training.study.cells import study_cells
from training.study.models import new_model
from training.study.settings import parse_study

STUDY = Path(__file__).resolve().parents[2] / "docs" / "study" / "settings" / "reference_gpu.yaml"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    assert train_tokenizer.main([str(folder), "--vocab_size=300", f"--dataset_name={texts}"]) == 0
    return folder


def test_a_trained_tokenizer_reads_and_writes_any_text(tokenizer_folder: Path, texts: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert len(tokenizer) == 300
    for text in (next(texts.glob("*.txt")).read_text(), "übel 犬 \x00\n"):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text
        assert len(tokens) < len(text.encode()) or len(text) < 10
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_what_no_tokenizer_can_be_trained_from_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_tokenizer.main([str(tmp_path / "out"), f"--dataset_name={tmp_path}/missing.txt"]) == 2
    assert "missing.txt" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_tokenizer.main([str(tmp_path / "out"), "--vocab_size=100"])
    assert "at least 258" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rows_without_text_are_left_out(tmp_path: Path) -> None:
    rows = [{"text": "A ship left the harbour."}, {"text": None}, {"text": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(tmp_path / "out"), "--vocab_size=260", f"--dataset_name={tmp_path / 'rows.jsonl'}"]
    assert train_tokenizer.main(arguments) == 0


@pytest.mark.parametrize(
    ("program", "function", "words"),
    [
        (train_tokenizer, "train_tokenizer", ["out"]),
        (search_spectrum, "_run", ["model", "out", "--length", "256", "--text", "a.txt", "--held_out", "b.txt"]),
    ],
)
def test_what_saves_nothing_on_the_way_does_not_promise_to_go_on(
    program: Any, function: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, function, interrupted)
    assert program.main(words) == 130
    assert "Interrupted. Nothing was saved." in capsys.readouterr().err


def test_python_source_is_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert python_source.main([str(tmp_path / "source.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "source.jsonl").read_text().splitlines()]
    names = {row["name"] for row in rows}
    assert {"ast.py", "json/decoder.py"} <= names
    assert not any("test" in Path(name).parts or "site-packages" in name for name in names)
    assert {row["python"] for row in rows} == {platform.python_version()}
    assert "JSONDecoder" in next(row["text"] for row in rows if row["name"] == "json/decoder.py")
    assert "ends in .jsonl" in refused(capsys, python_source.main, [str(tmp_path / "source.csv")])


def test_the_larger_study_has_the_size_that_its_text_says() -> None:
    study = parse_study([str(STUDY)], "")
    assert study.max_steps * study.batch_size * study.train_length == pytest.approx(60e6, rel=0.01)
    assert study.lengths[-1] == 8192
    assert (len(study.schemes), len(study.seeds)) == (8, 3)
    task = study_cells(study)[0].task
    model = new_model(task, study, word_tokenizer(map(str, range(8192)), pad_token="1"), 8192)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(15e6, rel=0.01)
    assert "15 million parameters" in STUDY.read_text()


def test_the_larger_study_runs_at_a_small_size(
    tokenizer_folder: Path, texts: Path, tmp_path: Path, no_figures: None
) -> None:
    small = {
        "schemes": None, "tasks": None, "tokenizer_name": tokenizer_folder, "seeds": 0, "length_factor": 2,
        "batch_size": 2, "eval_windows": 2, "trainer": "{bf16: true, use_cpu: true}",
    }  # fmt: skip
    assert compare.main([str(STUDY), *study_words(texts, tmp_path / "out", **small)]) == 0
    runs = study_runs(tmp_path / "out").values()
    assert [run["status"] for run in runs] == ["finished"] * 8
    assert len({run["by_length"]["loss"][-1] for run in runs}) > 4
