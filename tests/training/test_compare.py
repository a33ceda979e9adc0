"""A study end to end, on tiny models and a few documents."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from filelock import FileLock

from docs.study import archive
from tests.thinning import mostly_slow
from tests.training.run_cases import CONFIGS, REPOSITORY, launch
from training import compare
from training.checkpoints import latest_complete_checkpoint
from training.study import outputs, run, workers
from training.study.folder import LOCK

STRETCHED = {"stretched": {"scheme": "rope", "from": "rope", "training": {"max_steps": 0}, "theta": 500.0}}


def runs_in(folder: Path) -> list[dict[str, object]]:
    """The trainings of a study."""
    return json.loads((folder / "results.json").read_text())["runs"]


def curves(folder: Path) -> dict[str, object]:
    """Everything of a study that must not depend on how often it was interrupted, without what has no value."""
    results = json.loads(
        (folder / "results.json").read_text(),
        object_hook=lambda named: {name: value for name, value in named.items() if value is not None},
    )
    figures = ("curve", "by_length", "exact_match", "dog")
    return {
        f"{training['task']}-{training['scheme']}-{training['seed']}": [training.get(name) for name in figures]
        for training in results["runs"]
    }


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """They take longer than a training; test_report.py checks them."""
    monkeypatch.setattr(outputs, "draw_figures", lambda *_: [])


@pytest.fixture(scope="module")
def arguments_of(text_folder):
    def arguments(folder: Path) -> list[str]:
        return [
            f"--dataset_name={text_folder}", f"--output_dir={folder}", "--schemes=none,native,rope,stretched",
            f"--scheme_options={json.dumps(STRETCHED)}", "--tasks=causal,masked,repeated_copy", "--seeds=0,1",
            '--task_options={"repeated_copy": {"schemes": ["none"], "test_lengths": "3,12", "test_samples": 4}}',
            "--max_steps=6", "--eval_every=2", "--checkpoint_every=2", "--batch_size=4", "--train_length=16",
            "--hidden_size=16", "--num_heads=2", "--num_layers=1", "--eval_windows=6", "--warmup_steps=1",
            "--validation_fraction=0.25", "--workers=1", "--save_models",
        ]  # fmt: skip

    return arguments


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments_of):
    folder = tmp_path_factory.mktemp("finished") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "draw_figures", lambda *_: [])
        assert compare.main(arguments_of(folder)) == 0
    return folder


@pytest.fixture(scope="module")
def results(finished):
    return json.loads((finished / "results.json").read_text())


def test_results_hold_settings_versions_and_every_training(finished, results):
    assert len((finished / "results.json").read_text()) < 80_000
    assert results["settings"]["train_length"] == 16
    assert results["command"].startswith("python training/compare.py --dataset_name=")
    assert str(finished) not in results["command"]
    assert "--workers" not in results["command"]
    assert results["tasks"]["causal"]["lengths"] == [16, 32, 64]
    assert results["tasks"]["repeated_copy"]["lengths"] == [3, 12]
    assert results["corpus"]["train_documents"] == 6
    assert results["corpus"]["validation_documents"] == 2
    assert 1.0 < results["tasks"]["causal"]["unigram_cross_entropy"] < math.log(384)
    names = [(training["task"], training["scheme"], training["seed"]) for training in results["runs"]]
    labels = ("none", "native", "rope", "stretched")
    assert names == [
        (task, label, seed)
        for task, chosen in (("causal", labels), ("masked", labels), ("repeated_copy", ("none",)))
        for label in chosen
        for seed in (0, 1)
    ]
    for training in results["runs"]:
        assert training["status"] == "finished"
        assert training["parameters"] > 0
        curve = training["curve"]
        assert all(0 < loss < 10 for loss in curve["train_loss"] + curve["validation_loss"])
        if training["scheme"] == "stretched":
            assert (curve["step"], training["seconds"]) == ([0], 0)
        else:
            assert curve["step"] == [2, 4, 6]
            assert training["seconds"] > 0
        if training["task"] == "repeated_copy":
            assert all(0 <= share <= 1 for share in training["exact_match"]["accuracy"])
        else:
            assert len(training["by_length"]["loss"]) == len(training["by_length"]["tail_loss"]) == 3
            assert training["by_length"]["position_edges"][-1] == 64


def figures(results, task, scheme, seed=0):
    (training,) = [
        training
        for training in results["runs"]
        if (training["task"], training["scheme"], training["seed"]) == (task, scheme, seed)
    ]
    return training["curve"]["validation_loss"], training["by_length"]["loss"]


def test_the_unpatched_model_is_the_control(results):
    """Llama's own positions are RoPE with the same theta: the two trainings are the same one."""
    assert figures(results, "causal", "native") == figures(results, "causal", "rope")
    assert figures(results, "causal", "native") != figures(results, "causal", "none")
    assert figures(results, "masked", "native") != figures(results, "masked", "rope")


def test_seeds_and_zero_shot_swaps_differ(results):
    assert figures(results, "causal", "rope", seed=0) != figures(results, "causal", "rope", seed=1)
    (read,), by_length = figures(results, "causal", "stretched")
    trained, trained_by_length = figures(results, "causal", "rope")
    assert by_length != trained_by_length
    assert read == pytest.approx(trained[-1], abs=0.1)


def test_dog_distance_is_zero_only_without_positions(results):
    masked = {training["scheme"]: training["dog"] for training in results["runs"] if training["task"] == "masked"}
    assert masked["none"]["layers"][-1] < 1e-5
    assert masked["rope"]["layers"][-1] > 1e-4


def test_training_changes_the_loss(results):
    for training in results["runs"]:
        losses = training["curve"]["validation_loss"]
        assert training["scheme"] == "stretched" or losses[-1] < losses[0]


def test_saved_models_come_back_in_a_fresh_process(finished):
    script = (
        "import hf_posenc, sys, torch; from transformers import AutoModelForMaskedLM as M;"
        "m = M.from_pretrained(sys.argv[1]); print(type(m).__name__, m.position_encoding.config.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(finished / "models" / "masked-rope-seed1")],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["BertForMaskedLM", "rope"]
    assert (finished / "models" / "masked-rope-seed1" / "README.md").exists()
    assert (finished / "models" / "masked-native-seed1" / "tokenizer_config.json").exists()


def test_a_finished_study_is_not_trained_again(finished, arguments_of, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("a finished training was started again")

    monkeypatch.setattr(workers, "run_cell", refuse)
    before = curves(finished)
    assert compare.main(arguments_of(finished)) == 0
    assert curves(finished) == before
    assert "report.html" in capsys.readouterr().out


def test_packed_trainings_are_not_trained_again_elsewhere(finished, arguments_of, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a packed training was started again")

    file, elsewhere = tmp_path / "runs.parquet", tmp_path / "elsewhere"
    assert archive.main(["pack", str(finished), str(file)]) == 0
    table = pd.read_parquet(file)
    assert len(table) == 18
    assert set(table.task) == {"causal", "masked", "repeated_copy"}
    assert table.learning_rate.eq(2e-3).all()
    assert len(table.by_length[0]["loss"]) == 3
    written = json.loads((finished / "results.json").read_text())
    assert archive.study_in(file) == {name: value for name, value in written.items() if name != "runs"}

    monkeypatch.setattr(workers, "run_cell", refuse)
    assert archive.main(["unpack", str(file), str(elsewhere)]) == 0
    arguments = [word for word in arguments_of(elsewhere) if word != "--save_models"]
    assert compare.main(arguments) == 0
    assert curves(elsewhere) == curves(finished)
    # Models are not packed, so one that a new training would start from is missed at once.
    again = json.dumps({**STRETCHED, "again": {"scheme": "alibi", "from": "rope"}})
    assert compare.main([*arguments, "--schemes=rope,stretched,again", f"--scheme_options={again}"]) == 2


def test_what_is_no_archive_is_refused(finished, tmp_path, capsys):
    file = tmp_path / "runs.parquet"
    assert archive.main(["pack", str(tmp_path), str(file)]) == 2
    assert "has no training that has ended" in capsys.readouterr().err
    pd.DataFrame({"loss": [1.0]}).to_parquet(file)
    assert archive.main(["unpack", str(file), str(tmp_path / "out")]) == 2
    assert "holds no trainings of a study" in capsys.readouterr().err
    file.write_text("loss: 1.0")
    assert archive.main(["unpack", str(file), str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    archive.pack(finished, file)
    assert archive.main(["unpack", str(file), str(finished)]) == 2
    assert "already" in capsys.readouterr().err
    assert archive.main(["unpack", str(tmp_path / "run.parquet"), str(tmp_path / "out")]) == 2
    assert "Did you mean runs.parquet?" in capsys.readouterr().err
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert archive.main(["unpack", str(file), str(model)]) == 2
    assert "does not hold a study" in capsys.readouterr().err
    assert [path.name for path in model.iterdir()] == ["config.json"]


def test_a_training_waits_for_its_start_and_for_nothing_else(tiny, tmp_path):
    arguments = tiny(
        tasks="causal", schemes="none,rope,stretched", scheme_options=json.dumps(STRETCHED), seeds="0,1", workers=2
    )
    assert compare.main(arguments) == 0
    trainings = tmp_path / "out" / "trainings"
    ended = sorted(trainings.glob("*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    order = [path.parent.name for path in ended]
    assert order.index("causal-stretched-seed0") > order.index("causal-rope-seed0")
    # Seed by seed: a study that is stopped has the same schemes with each seed that it came to.
    assert order.index("causal-stretched-seed0") < order.index("causal-rope-seed1")


@pytest.mark.parametrize("task", mostly_slow(["causal", "masked", "repeated_copy"], lambda task: task == "causal"))
def test_interrupted_and_resumed_equals_uninterrupted(tiny, tmp_path, monkeypatch, task):
    options = {"tasks": task, "schemes": "learned", "max_steps": 7, "test_samples": 4}
    assert compare.main(tiny(output_dir=tmp_path / "straight", **options)) == 0

    real = run.run_cell
    interruptions = iter([3, 5])

    def interrupted(cell, on_step):
        stop = next(interruptions, None)

        def report(step):
            on_step(step)
            if step == stop:
                raise KeyboardInterrupt

        return real(cell, report)

    monkeypatch.setattr(workers, "run_cell", interrupted)
    arguments = tiny(output_dir=tmp_path / "broken", **options)
    assert compare.main(arguments) == 130
    folder = tmp_path / "broken" / "trainings" / f"{task}-learned-seed0"
    assert latest_complete_checkpoint(folder).name == "checkpoint-2"
    assert compare.main(arguments) == 130
    assert latest_complete_checkpoint(folder).name == "checkpoint-4"
    assert compare.main(arguments) == 0
    assert not list(folder.glob("checkpoint-*"))
    assert curves(tmp_path / "broken") == curves(tmp_path / "straight")


@pytest.mark.slow
def test_killed_workers_leave_what_a_second_start_completes(tiny, tmp_path):
    options = {"tasks": "masked", "schemes": "none,alibi", "max_steps": 40, "eval_every": 20, "checkpoint_every": 1}
    straight = tmp_path / "straight"
    assert compare.main(tiny(output_dir=straight, **options)) == 0

    killed = tmp_path / "killed"
    command = [sys.executable, "training/compare.py", *tiny(output_dir=killed, workers=2, **options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not list(killed.glob("trainings/*/checkpoint-*")):
        assert process.poll() is None, "ended before its first checkpoint"
        assert time.monotonic() < limit, "no checkpoint within two minutes"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "results.json").exists()

    assert compare.main(tiny(output_dir=killed, workers=1, **options)) == 0
    assert curves(killed) == curves(straight)


def test_schemes_and_seeds_can_be_added_but_other_settings_cannot_change(tiny, capsys):
    options = {"tasks": "causal", "max_steps": 2}
    assert compare.main(tiny(schemes="none", **options)) == 0
    assert compare.main(tiny(schemes="none,alibi", seeds="0,1", **options)) == 0
    capsys.readouterr()

    assert compare.main(tiny(tasks="causal", schemes="none", max_steps=3)) == 2
    message = capsys.readouterr().err
    assert "max_steps was 2 and is now 3" in message

    changed = tiny(schemes="alibi", scheme_options='{"alibi": {"learnable": true}}', **options)
    assert compare.main(changed) == 2
    assert "causal-alibi-seed0" in capsys.readouterr().err


def test_a_training_without_figures_may_begin_again_with_other_settings(tiny, tmp_path):
    options = {"tasks": "causal", "max_steps": 2}
    too_few = tiny(schemes="none,learned", scheme_options='{"learned": {"num_positions": 20}}', **options)
    assert compare.main(too_few) == 0
    enough = tiny(schemes="none,learned", scheme_options='{"learned": {"num_positions": 64}}', **options)
    assert compare.main(enough) == 0
    trainings = runs_in(tmp_path / "out")
    assert [training["status"] for training in trainings] == ["finished", "finished"]


def test_one_learning_rate_and_a_choice_of_several_exclude_each_other(tiny, capsys):
    assert compare.main(tiny(tasks="causal", schemes="none", learning_rates="[1e-3]", learning_rate=1e-3)) == 2
    assert "chooses one for each of them" in capsys.readouterr().err


def test_trainings_that_choose_a_learning_rate_read_no_more_than_losses(tiny, tmp_path):
    assert compare.main(tiny(tasks="causal", schemes="none", learning_rates="[1e-3]", max_steps=2, eval_every=1)) == 0

    def reading(folder):
        (run,) = runs_in(tmp_path / folder)
        return set(run["by_length"])

    assert reading("out_rates") == {"lengths", "loss"}
    assert reading("out") > {"lengths", "loss", "sliding_loss", "tail_loss", "position_loss"}


def test_models_cannot_be_asked_for_afterwards(tiny, capsys):
    arguments = tiny(tasks="causal", schemes="none", max_steps=1, eval_every=1)
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--save_models"]) == 2
    assert "causal-none-seed0 has ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "options", "reason"),
    [("alibi", '{"alibi": {"variant": "causal"}}', "causal"), ("learned", '{"learned": {"num_positions": 20}}', "20")],
)
def test_a_scheme_the_model_cannot_take_is_a_row_with_its_reason(tiny, tmp_path, scheme, options, reason):
    arguments = tiny(tasks="masked", schemes=f"{scheme},none", scheme_options=options, max_steps=2)
    assert compare.main(arguments) == 0
    first, second = runs_in(tmp_path / "out")
    assert (first["status"], second["status"]) == ("unsupported", "finished")
    assert reason in first["reason"]
    assert first["reason"] in (tmp_path / "out" / "table.md").read_text()


def test_a_training_that_starts_from_an_unsupported_one_is_unsupported_too(tiny, tmp_path):
    options = {"learned": {"num_positions": 20}, "swapped": {"scheme": "none", "from": "learned"}}
    arguments = tiny(schemes="learned,swapped", tasks="causal", scheme_options=json.dumps(options), max_steps=2)
    assert compare.main(arguments) == 1  # no training finished
    _, swapped = runs_in(tmp_path / "out")
    assert swapped["status"] == "unsupported"
    assert "starts from 'learned'" in swapped["reason"]


def test_a_diverging_loss_is_recorded_and_the_others_go_on(tiny, tmp_path, monkeypatch):
    begin = run.begin

    def poisoned(cell, *rest):
        beginning = begin(cell, *rest)
        if cell.label == "none":
            beginning.model.get_input_embeddings().weight.data.fill_(float("nan"))
        return beginning

    monkeypatch.setattr(run, "begin", poisoned)
    assert compare.main(tiny(tasks="causal", max_steps=2)) == 0
    trainings = runs_in(tmp_path / "out")
    assert [training["status"] for training in trainings] == ["diverged", "finished"]
    assert "loss became nan" in (tmp_path / "out" / "table.md").read_text()


def test_an_unexpected_failure_is_reported_and_tried_again(tiny, tmp_path):
    def broken(*_):
        raise RuntimeError("out of luck")

    arguments = tiny(tasks="causal", schemes="none", max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "begin", broken)
        assert compare.main(arguments) == 1
    assert "RuntimeError: out of luck" in (tmp_path / "out" / "table.md").read_text()
    assert compare.main(arguments) == 0


def test_two_runs_cannot_share_a_folder(tiny, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / LOCK):
        assert compare.main(tiny()) == 2
    assert "Another study is writing" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tiny, tmp_path, capsys):
    precious = tmp_path / "out" / "data" / "mine.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    assert compare.main(tiny()) == 2
    assert "is not empty (data)" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["data", "mine.txt"]
    assert compare.main(tiny(output_dir=precious)) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_result_that_was_cut_off_is_named_and_can_be_made_anew(tiny, tmp_path, capsys):
    arguments = tiny(tasks="causal", schemes="none", max_steps=2)
    assert compare.main(arguments) == 0
    before = curves(tmp_path / "out")
    path = tmp_path / "out" / "trainings" / "causal-none-seed0" / "result.json"
    path.write_text(path.read_text()[:100])
    capsys.readouterr()
    assert compare.main(arguments) == 2
    assert f"{path} cannot be read" in capsys.readouterr().err
    path.unlink()
    assert compare.main(arguments) == 0
    assert curves(tmp_path / "out") == before


def test_a_full_disk_is_told_in_one_line(tiny, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compare, "write_outputs", full)
    assert compare.main(tiny(tasks="causal", schemes="none", max_steps=1, eval_every=1)) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_threads_are_those_of_the_trainings_not_of_the_last_start(tiny, tmp_path, monkeypatch):
    arguments = tiny(tasks="causal", schemes="none", max_steps=1, eval_every=1)
    assert compare.main(arguments) == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert compare.main(arguments) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["machine"]["threads_per_run"] == 1


@pytest.mark.slow
def test_two_processes_equal_one(tiny, tmp_path):
    """The same batch dealt out to two processes gives the same curve; only sums are taken in another order."""
    options = {"tasks": "masked", "schemes": "t5", "max_steps": 4}
    losses = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        config = CONFIGS / ("ddp_cpu.yaml" if count == 2 else "one_process.yaml")
        said = launch(config, REPOSITORY / "training/compare.py", tiny(output_dir=folder, **options))
        (result,) = runs_in(folder)
        assert result["processes"] == count
        assert said.count("Written to ") == 1
        losses.append(torch.tensor(result["curve"]["train_loss"] + result["by_length"]["loss"]))
    # Losses are rounded to four places in the results.
    torch.testing.assert_close(losses[0], losses[1], atol=2e-4, rtol=0)
