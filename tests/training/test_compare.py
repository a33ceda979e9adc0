"""A study end to end, on tiny models and a few documents."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from docs.study import archive
from hf_posenc.cli import main
from hf_posenc.report import Result
from tests.fresh import run_fresh
from tests.thinning import mostly_slow
from tests.training.run_cases import CONFIGS, REPOSITORY, launch, refused, study_figures, study_runs, study_words
from training import compare
from training.checkpoints import latest_complete_checkpoint
from training.study import run, workers

pytestmark = pytest.mark.usefixtures("no_figures")

Words = Callable[..., list[str]]
STRETCHED = {"stretched": {"scheme": "rope", "from": "rope", "training": {"max_steps": 0}, "theta": 500.0}}


def three_tasks(text: Path, output: Path, **changes: Any) -> list[str]:
    copied = {"repeated_copy": {"schemes": ["none"], "test_lengths": "3,12", "test_samples": 4}}
    options = {
        "schemes": "none,native,rope,stretched", "scheme_options": STRETCHED, "tasks": "causal,masked,repeated_copy",
        "seeds": "0,1", "task_options": copied, "max_steps": 6, "save_models": "true",
    }  # fmt: skip
    return study_words(text, output, **(options | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, texts: Path, no_figures: None) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "my study"
    assert compare.main(three_tasks(texts, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def runs(finished: Path) -> dict[str, dict[str, Any]]:
    return study_runs(finished)


@pytest.fixture
def never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "run_cell", lambda *_: pytest.fail("a training that has ended was started again"))


@pytest.mark.long
def test_results_hold_settings_versions_and_every_training(finished: Path, runs: dict[str, dict[str, Any]]) -> None:
    text = (finished / "results.json").read_text()
    results = json.loads(text)
    assert len(text) < 80_000
    assert results["settings"]["train_length"] == 16
    assert results["command"].startswith("hf-posenc compare --dataset_name=")
    assert str(finished) not in results["command"]
    assert "--workers" not in results["command"]
    assert results["machine"]["threads_per_run"] == 1
    assert results["tasks"]["causal"]["lengths"] == [16, 32, 64]
    assert results["tasks"]["repeated_copy"]["lengths"] == [3, 12]
    assert (results["corpus"]["train_documents"], results["corpus"]["validation_documents"]) == (6, 2)
    assert 1.0 < results["tasks"]["causal"]["unigram_cross_entropy"] < math.log(384)
    labels = ("none", "native", "rope", "stretched")
    chosen = [("causal", labels), ("masked", labels), ("repeated_copy", ("none",))]
    assert list(runs) == [f"{task}-{label}-{seed}" for task, those in chosen for label in those for seed in (0, 1)]
    for training in runs.values():
        curve, read_only = training["curve"], training["scheme"] == "stretched"
        assert training["status"] == "finished"
        assert training["parameters"] > 0
        assert all(0 < loss < 10 for loss in curve["train_loss"] + curve["validation_loss"])
        assert (curve["step"], training["seconds"] > 0) == (([0], False) if read_only else ([2, 4, 6], True))
        assert read_only or curve["validation_loss"][-1] < curve["validation_loss"][0]
        if training["task"] == "repeated_copy":
            assert all(0 <= share <= 1 for share in training["exact_match"]["accuracy"])
        else:
            assert len(training["by_length"]["loss"]) == len(training["by_length"]["tail_loss"]) == 3
            assert training["by_length"]["position_edges"][-1] == 64


def test_schemes_and_seeds_differ_and_the_unpatched_model_is_the_control(runs: dict[str, dict[str, Any]]) -> None:
    def figures(name: str) -> tuple[list[float], list[float]]:
        return runs[name]["curve"]["validation_loss"], runs[name]["by_length"]["loss"]

    # Llama's own positions are RoPE with the same theta: the two trainings are the same one.
    assert figures("causal-native-0") == figures("causal-rope-0") != figures("causal-none-0")
    assert figures("causal-rope-0") != figures("causal-rope-1")
    assert figures("masked-native-0") != figures("masked-rope-0")
    (read,), by_length = figures("causal-stretched-0")
    trained, trained_by_length = figures("causal-rope-0")
    assert by_length != trained_by_length
    assert read == pytest.approx(trained[-1], abs=0.1)
    assert runs["masked-none-0"]["dog"]["layers"][-1] < 1e-5
    assert runs["masked-rope-0"]["dog"]["layers"][-1] > 1e-4


@pytest.mark.long
def test_saved_models_come_back_and_are_compared(finished: Path, capsys: Any) -> None:
    folder = finished / "models" / "masked-rope-seed1"
    done = run_fresh(
        "import hf_posenc, sys, torch; from transformers import AutoModelForMaskedLM as M;"
        f"m = M.from_pretrained({str(folder)!r}); print(type(m).__name__, m.position_encoding.config.name)"
    )
    assert done.stdout.split() == ["BertForMaskedLM", "rope"]
    other = folder.with_name("masked-none-seed1")
    assert main(["eval", "dog", str(folder), str(other), "--sentence", "dog dog", "--json"]) == 0
    assert Result.from_dict(json.loads(capsys.readouterr().out)).labels == [folder.name, other.name]
    assert (folder / "README.md").exists()
    assert (finished / "models" / "masked-native-seed1" / "tokenizer_config.json").exists()


@pytest.mark.long
def test_a_finished_study_is_not_trained_again(
    finished: Path, texts: Path, never_trained: None, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = study_figures(finished)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert compare.main(three_tasks(texts, finished)) == 0
    assert study_figures(finished) == before
    said = capsys.readouterr().out
    assert "report.html" in said
    for command in ("loss {}/causal-* --text FILE --lengths 16 32 64", "generalization {}/repeated_copy-* --task rep"):
        assert f"  hf-posenc eval {command.format(shlex.quote(str(finished / 'models')))}" in said
    assert compare.main(three_tasks(texts, finished, save_models=None)) == 0
    assert "were not kept" in capsys.readouterr().out
    # Threads are those of the trainings, and not of the last start.
    assert json.loads((finished / "results.json").read_text())["machine"]["threads_per_run"] == 1


def test_packed_trainings_are_not_trained_again_elsewhere(
    finished: Path, texts: Path, tmp_path: Path, never_trained: None
) -> None:
    file, elsewhere = tmp_path / "runs.parquet", tmp_path / "elsewhere"
    assert archive.main(["pack", str(finished), str(file)]) == 0
    table = pd.read_parquet(file)
    assert (len(table), set(table.task)) == (18, {"causal", "masked", "repeated_copy"})
    assert table.learning_rate.eq(2e-3).all()
    assert len(table.by_length[0]["loss"]) == 3
    written = json.loads((finished / "results.json").read_text())
    assert archive.study_in(file) == {name: value for name, value in written.items() if name != "runs"}
    assert archive.main(["unpack", str(file), str(elsewhere)]) == 0
    assert compare.main(three_tasks(texts, elsewhere, save_models=None)) == 0
    assert study_figures(elsewhere) == study_figures(finished)
    # Models are not packed, so one that a new training would start from is missed at once.
    again = {
        "schemes": "rope,stretched,again",
        "scheme_options": STRETCHED | {"again": {"scheme": "alibi", "from": "rope"}},
    }
    assert compare.main(three_tasks(texts, elsewhere, save_models=None, **again)) == 2


def test_what_is_no_archive_is_refused(finished: Path, tmp_path: Path, capsys: Any) -> None:
    whole, file, model = tmp_path / "whole.parquet", tmp_path / "runs.parquet", tmp_path / "model"
    archive.pack(finished, whole)
    pd.DataFrame({"loss": [1.0]}).to_parquet(tmp_path / "other.parquet")
    file.write_text("loss: 1.0")
    model.mkdir()
    (model / "config.json").write_text("{}")
    for words, message in (
        (["pack", tmp_path, file], "has no training that has ended"),
        (["unpack", tmp_path / "other.parquet", tmp_path / "out"], "holds no training runs of a study"),
        (["unpack", file, tmp_path / "out"], "cannot be read"),
        (["unpack", whole, finished], "already"),
        (["unpack", tmp_path / "run.parquet", tmp_path / "out"], "Did you mean runs.parquet?"),
        (["unpack", whole, model], "does not contain a study"),
    ):
        assert message in refused(capsys, archive.main, [str(word) for word in words])
    assert [path.name for path in model.iterdir()] == ["config.json"]


@pytest.mark.long
@pytest.mark.parametrize("task", mostly_slow(["causal", "masked", "repeated_copy"], lambda task: task == "causal"))
def test_interrupted_and_resumed_equals_uninterrupted(
    tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    options = {"tasks": task, "schemes": "learned", "max_steps": 7}
    if task == "repeated_copy":
        of_text = ("dataset_name", "train_length", "eval_windows", "validation_fraction")
        options |= {"test_samples": 4, **dict.fromkeys(of_text)}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert compare.main(tiny(output_dir=straight, **options)) == 0
    real, interruptions = run.run_cell, iter([3, 5])

    def interrupted(cell: Any, on_step: Any) -> dict[str, Any]:
        stop = next(interruptions, None)

        def report(step: int) -> None:
            on_step(step)
            if step == stop:
                raise KeyboardInterrupt

        return real(cell, report)

    monkeypatch.setattr(workers, "run_cell", interrupted)
    folder = broken / "trainings" / f"{task}-learned-seed0"
    for step in (2, 4):
        assert compare.main(tiny(output_dir=broken, **options)) == 130
        assert latest_complete_checkpoint(folder) == folder / f"checkpoint-{step}"
    assert compare.main(tiny(output_dir=broken, **options)) == 0
    assert not list(folder.glob("checkpoint-*"))
    assert study_figures(broken) == study_figures(straight)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, texts: Path, no_figures: None) -> Path:
    """A finished study of one training, which no test changes."""
    folder = tmp_path_factory.mktemp("small") / "out"
    assert compare.main(study_words(texts, folder, schemes="none")) == 0
    return folder


@pytest.fixture
def begun(small: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(small, tmp_path / "out")


@pytest.mark.long
def test_schemes_and_seeds_can_be_added(begun: Path, tiny: Words) -> None:
    before = study_figures(begun)
    assert compare.main(tiny(seeds="0,1")) == 0
    both = study_figures(begun)
    assert (both["causal-none-0"], len(both)) == (before["causal-none-0"], 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 3}, "max_steps was 2 and is now 3"),
        ({"scheme_options": {"none": {"training": {"learning_rate": 1.0}}}}, "causal-none-seed0 in "),
        ({"save_models": "true"}, "causal-none-seed0 is finished"),
        ({"learning_rates": "[1e-3]", "learning_rate": 1e-3}, "chooses one for each scheme"),
    ],
)
def test_other_settings_cannot_be_mixed_in(
    begun: Path, tiny: Words, capsys: Any, changes: dict[str, Any], message: str, never_trained: None
) -> None:
    assert message in refused(capsys, compare.main, tiny(schemes="none", **changes))


def test_a_result_that_was_cut_off_is_named_and_can_be_made_anew(begun: Path, tiny: Words, capsys: Any) -> None:
    before = study_figures(begun)
    path = begun / "trainings" / "causal-none-seed0" / "result.json"
    path.write_text(path.read_text()[:100])
    assert f"{path} cannot be read" in refused(capsys, compare.main, tiny(schemes="none"))
    path.unlink()
    assert compare.main(tiny(schemes="none")) == 0
    assert study_figures(begun) == before
    whole = path.read_text()
    path.write_text(whole.replace('"finished"', '"done"'))
    assert compare.main(tiny(schemes="none")) == 2
    assert f"{path}: status is 'done'; expected 'finished', 'unsupported'" in capsys.readouterr().err
    path.write_text(whole)


def test_a_full_disk_is_told_in_one_line(
    begun: Path, tiny: Words, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compare, "write_outputs", full)
    assert "No space left on device" in refused(capsys, compare.main, tiny(schemes="none"), status=1)


def test_trainings_that_choose_a_learning_rate_read_no_more_than_losses(tiny: Words, tmp_path: Path) -> None:
    assert compare.main(tiny(schemes="none", learning_rates="[1e-3]")) == 0
    (tried,), (chosen,) = (study_runs(tmp_path / name).values() for name in ("out_rates", "out"))
    assert set(tried["by_length"]) == {"lengths", "loss"}
    assert set(chosen["by_length"]) > {"lengths", "loss", "sliding_loss", "tail_loss", "position_loss"}


def test_what_a_model_cannot_take_is_a_row_with_its_reason_and_may_begin_again(tiny: Words, tmp_path: Path) -> None:
    options = {
        "alibi": {"variant": "causal"}, "learned": {"num_positions": 20},
        "swapped": {"scheme": "none", "from": "learned"},
    }  # fmt: skip
    output, words = tmp_path / "out", {"tasks": "masked", "schemes": "alibi,learned,swapped"}
    assert compare.main(tiny(**words, scheme_options=options)) == 1  # no training finished
    table = (output / "table.md").read_text()
    for training, reason in zip(study_runs(output).values(), ("causal", "20", "starts from 'learned'"), strict=True):
        assert training["status"] == "unsupported"
        assert reason in training["reason"]
        assert training["reason"] in table
    # A training without figures may begin again with other settings.
    options["learned"]["num_positions"] = 64
    assert compare.main(tiny(**words, scheme_options=options)) == 0
    assert [training["status"] for training in study_runs(output).values()] == ["unsupported", *["finished"] * 2]


def test_trainings_that_fail_are_told_and_the_others_go_on(tiny: Words, tmp_path: Path) -> None:
    begin, output = run.begin, tmp_path / "out"

    def broken(cell: Any, *rest: Any) -> Any:
        if cell.label == "t5":
            raise RuntimeError("out of luck")
        beginning = begin(cell, *rest)
        if cell.label == "none":
            beginning.model.get_input_embeddings().weight.data.fill_(float("nan"))
        return beginning

    words = tiny(schemes="none,t5,alibi")
    for status, of_t5 in ((1, "failed"), (0, "finished")):
        with pytest.MonkeyPatch.context() as patch:
            if status:
                patch.setattr(run, "begin", broken)
            assert compare.main(words) == status
        assert [each["status"] for each in study_runs(output).values()] == ["diverged", of_t5, "finished"]
        text = (output / "table.md").read_text()
        assert "loss became nan" in text
        assert ("RuntimeError: out of luck" in text) == (status == 1)


def test_a_folder_of_something_else_is_left_alone(tiny: Words, tmp_path: Path, capsys: Any) -> None:
    mine = tmp_path / "out" / "data" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    for output, message in ((tmp_path / "out", "is not empty (data)"), (mine, "is a file")):
        assert message in refused(capsys, compare.main, tiny(output_dir=output))
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["data", "mine.txt"]


@pytest.mark.slow
def test_two_processes_equal_one(tiny: Words, tmp_path: Path) -> None:
    """The same batch dealt out to two processes gives the same curve; only sums are taken in another order."""
    losses = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        config = CONFIGS / ("ddp_cpu.yaml" if count == 2 else "one_process.yaml")
        arguments = tiny(output_dir=folder, tasks="masked", schemes="t5", max_steps=4)
        said = launch(config, REPOSITORY / "training/compare.py", arguments)
        (result,) = study_runs(folder).values()
        assert result["processes"] == count
        assert said.count("Written to ") == 1
        losses.append(torch.tensor(result["curve"]["train_loss"] + result["by_length"]["loss"]))
    # Losses are rounded to four places in the results.
    torch.testing.assert_close(losses[0], losses[1], atol=2e-4, rtol=0)
