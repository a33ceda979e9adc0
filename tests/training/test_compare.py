"""The comparison end to end, on tiny models and a few documents."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training import compare, loop
from training.files import latest_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]


def curves(folder: Path) -> dict[str, object]:
    """Everything of a comparison that must not depend on how often it was interrupted."""
    results = json.loads((folder / "results.json").read_text())
    return {
        f"{training['task']}-{training['scheme']}": (training["curve"], training["by_length"], training["dog"])
        for training in results["trainings"]
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text_folder):
    folder = tmp_path_factory.mktemp("finished") / "out"
    arguments = [
        f"--dataset_name={text_folder}",
        f"--output_dir={folder}",
        "--schemes=none,alibi",
        *[
            "--max_steps=6",
            "--eval_every=2",
            "--checkpoint_every=2",
            "--batch_size=4",
            "--train_length=16",
            "--hidden_size=16",
        ],
        *["--num_heads=2", "--num_layers=1", "--eval_windows=6", "--warmup_steps=1", "--validation_fraction=0.25"],
        *["--workers=1", "--save_models"],
    ]
    assert compare.main(arguments) == 0
    return folder


def test_results_hold_settings_versions_and_every_training(finished):
    text = (finished / "results.json").read_text()
    results = json.loads(text)
    assert len(text) < 30_000
    assert results["settings"]["train_length"] == 16
    assert results["lengths"] == [16, 32, 64]
    assert set(results["versions"]) == {"python", "hf-posenc", "torch", "transformers", "accelerate", "datasets"}
    assert results["corpus"]["train_documents"] == 6
    assert results["corpus"]["validation_documents"] == 2
    assert 1.0 < results["unigram_cross_entropy"] < math.log(384)
    names = [(training["task"], training["scheme"]) for training in results["trainings"]]
    assert names == [("causal", "none"), ("causal", "alibi"), ("masked", "none"), ("masked", "alibi")]
    for training in results["trainings"]:
        assert training["status"] == "finished"
        assert training["parameters"] > 0
        assert training["seconds"] > 0
        assert training["curve"]["step"] == [2, 4, 6]
        assert all(0 < loss < 10 for loss in training["curve"]["train_loss"] + training["curve"]["validation_loss"])
        by_length = training["by_length"]
        assert len(by_length["loss"]) == len(by_length["tail_loss"]) == 3
        assert len(by_length["position_loss"]) == len(by_length["position_edges"]) - 1
        assert by_length["position_edges"][-1] == 64


def test_dog_distance_is_zero_only_without_positions(finished):
    results = json.loads((finished / "results.json").read_text())
    masked = {training["scheme"]: training["dog"] for training in results["trainings"] if training["task"] == "masked"}
    assert masked["none"]["layers"][-1] < 1e-5
    assert masked["alibi"]["layers"][-1] > 1e-4


def test_training_changes_the_loss_and_schemes_differ(finished):
    trainings = json.loads((finished / "results.json").read_text())["trainings"]
    for training in trainings:
        assert training["curve"]["validation_loss"][-1] < training["curve"]["validation_loss"][0]
    assert trainings[0]["curve"] != trainings[1]["curve"]


def test_table_names_every_scheme_with_its_losses(finished):
    table = (finished / "table.md").read_text()
    results = json.loads((finished / "results.json").read_text())
    assert "Causal language model" in table
    assert "Masked language model" in table
    for training in results["trainings"]:
        row = f"{training['by_length']['loss'][0]:.3f}"
        assert any(line.startswith(f"| {training['scheme']}") and row in line for line in table.splitlines())
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_plots_exist_and_are_not_empty(finished):
    names = {path.name for path in (finished / "plots").iterdir()}
    stems = ("loss_curves", "loss_by_length", "tail_loss_by_length", "loss_by_position", "dog_distance")
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("png", "svg")}
    for path in (finished / "plots").iterdir():
        head = path.read_bytes()
        assert len(head) > 4000
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in head
    assert "validation loss" in (finished / "plots" / "loss_curves.svg").read_text()


def test_saved_models_carry_their_scheme(finished):
    config = json.loads((finished / "models" / "masked-alibi" / "config.json").read_text())
    assert "alibi" in json.dumps(config)


def test_a_finished_comparison_is_not_trained_again(finished, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("a finished training was started again")

    monkeypatch.setattr("training.workers.run_training", refuse)
    before = curves(finished)
    settings = json.loads((finished / "results.json").read_text())["settings"]
    arguments = [f"--{name}={value}" for name, value in settings.items() if value is not None and name != "save_models"]
    assert compare.main([*arguments, f"--output_dir={finished}", "--save_models"]) == 0
    assert curves(finished) == before
    assert "Causal language model" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_interrupted_and_resumed_equals_uninterrupted(tiny, tmp_path, monkeypatch, task):
    options = {"tasks": task, "schemes": "learned", "max_steps": 7}
    assert compare.main(tiny(output_dir=tmp_path / "straight", **options)) == 0

    real = loop.run_training
    interruptions = iter([3, 5])

    def interrupted(training, on_step):
        stop = next(interruptions, None)

        def report(step):
            on_step(step)
            if step == stop:
                raise KeyboardInterrupt

        return real(training, report)

    monkeypatch.setattr("training.workers.run_training", interrupted)
    arguments = tiny(output_dir=tmp_path / "broken", **options)
    assert compare.main(arguments) == 130
    folder = tmp_path / "broken" / "trainings" / f"{task}-learned"
    assert latest_checkpoint(folder).name == "checkpoint-2"
    assert compare.main(arguments) == 130
    assert latest_checkpoint(folder).name == "checkpoint-4"
    assert compare.main(arguments) == 0
    assert latest_checkpoint(folder) is None
    assert curves(tmp_path / "broken") == curves(tmp_path / "straight")


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


def test_schemes_can_be_added_but_other_settings_cannot_change(tiny, capsys):
    assert compare.main(tiny(tasks="causal", schemes="none", max_steps=2)) == 0
    assert compare.main(tiny(tasks="causal", schemes="none,alibi", max_steps=2)) == 0
    capsys.readouterr()

    assert compare.main(tiny(tasks="causal", schemes="none", max_steps=3)) == 2
    message = capsys.readouterr().err
    assert "max_steps was 2 and is now 3" in message
    assert "--overwrite" in message

    assert compare.main([*tiny(tasks="causal", schemes="none", max_steps=3), "--overwrite"]) == 0


def test_models_cannot_be_asked_for_afterwards(tiny, capsys):
    arguments = tiny(tasks="causal", schemes="none", max_steps=1, eval_every=1)
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--save_models"]) == 2
    assert "causal-none has ended" in capsys.readouterr().err


def test_changed_scheme_options_are_an_error(tiny, capsys):
    assert compare.main(tiny(tasks="causal", schemes="rope", max_steps=2)) == 0
    changed = tiny(tasks="causal", schemes="rope", max_steps=2, scheme_options='{"rope": {"theta": 100.0}}')
    capsys.readouterr()
    assert compare.main(changed) == 2
    assert "the options of 'rope'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "options", "reason"),
    [("alibi", '{"alibi": {"variant": "causal"}}', "causal"), ("learned", '{"learned": {"num_positions": 20}}', "20")],
)
def test_a_scheme_the_model_cannot_take_is_a_row_with_its_reason(tiny, tmp_path, scheme, options, reason):
    arguments = tiny(tasks="masked", schemes=f"{scheme},none", scheme_options=options, max_steps=2)
    assert compare.main(arguments) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [training["status"] for training in results["trainings"]] == ["unsupported", "finished"]
    assert reason in results["trainings"][0]["reason"]
    assert results["trainings"][0]["reason"] in (tmp_path / "out" / "table.md").read_text()


def test_a_diverging_loss_is_recorded_and_the_others_go_on(tiny, tmp_path):
    build = loop.build_model

    def poisoned(task, scheme, *rest):
        model = build(task, scheme, *rest)
        if scheme == "none":
            model.get_input_embeddings().weight.data.fill_(float("nan"))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_model", poisoned)
        assert compare.main(tiny(tasks="causal", max_steps=2)) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [training["status"] for training in results["trainings"]] == ["diverged", "finished"]
    assert "loss became nan" in (tmp_path / "out" / "table.md").read_text()


def test_an_unexpected_failure_is_reported_and_tried_again(tiny, tmp_path):
    def broken(*_):
        raise RuntimeError("out of luck")

    arguments = tiny(tasks="causal", schemes="none", max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_model", broken)
        assert compare.main(arguments) == 1
    assert "RuntimeError: out of luck" in (tmp_path / "out" / "table.md").read_text()
    assert compare.main(arguments) == 0


def test_two_runs_cannot_share_a_folder(tiny, tmp_path, capsys):
    from training.output_folder import lock

    held = lock(tmp_path / "out")
    try:
        assert compare.main(tiny()) == 2
    finally:
        held.release()
    assert "Another comparison is writing" in capsys.readouterr().err


def test_runs_under_accelerate_launch(tiny, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "--cpu"]
    arguments = tiny(tasks="masked", schemes="t5", max_steps=2)
    done = subprocess.run(
        [*command, "training/compare.py", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["trainings"][0]["status"] == "finished"
