"""The Trainer's promises: exact sums, exact resumption, and errors instead of broken runs."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_posenc.recipes import parameter_groups
from tests.thinning import mostly_slow
from tests.training.trainer_cases import Rows, curve, tiny, trainer
from training.arguments import check_trainer_arguments
from training.checkpoints import (
    SETTINGS_FILE,
    check_run,
    checkpoint_settings,
    differences,
    incompleteness,
    latest_complete_checkpoint,
)
from training.errors import SettingsError
from training.files import write_json
from training.trainer import NonFiniteLossError, SavingError

both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "masked"])


class At(TrainerCallback):
    """Runs an action at an event of one step, with the keywords that the Trainer passes."""

    def __init__(self, step: int, action: Callable[..., None], event: str = "on_step_end") -> None:
        self.step, self.action = step, action
        setattr(self, event, self._act)

    def _act(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            self.action(control=control, **given)


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def test_weight_decay_is_what_the_schemes_paper_wants(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    groups = made.create_optimizer().param_groups
    wanted = parameter_groups(made.model, 0.1)
    for group, expected in zip(groups, wanted, strict=True):
        assert group["weight_decay"] == expected["weight_decay"]
        assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in expected["params"]}
    undecayed = {id(parameter) for parameter in groups[1]["params"]}
    learned = list(made.model.position_encoding.parameters())
    assert learned
    assert all(id(parameter) in undecayed for parameter in learned)


@pytest.mark.parametrize(
    ("stop", "causal"), mostly_slow(product([2, 4, 5, 7, 8], [True, False]), {(4, False), (7, True)}.__contains__)
)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, causal: bool, stop: int) -> None:
    """11 rows, batches of 2 x 2: two updates an epoch. Stops between logs, in an epoch, at its end, and at the end."""
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    whole = trainer(tmp_path / "whole", causal, **options)
    outcome = whole.train()

    def end(control: Any, **_: Any) -> None:
        control.should_training_stop = True

    cut = options | {"save_strategy": "steps", "save_steps": stop, "callbacks": [At(stop, end)]}
    first = trainer(tmp_path / "cut", causal, **cut)
    first.train()
    second = trainer(tmp_path / "cut", causal, **options)
    torch.manual_seed(99)  # where a new process happens to stand
    resumed = second.train(resume_from_checkpoint=str(latest_complete_checkpoint(tmp_path / "cut")))
    assert (resumed.global_step, resumed.training_loss) == (outcome.global_step, outcome.training_loss)
    assert curve(second) == curve(whole)
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(whole).items())


@both
def test_evaluation_takes_no_random_numbers_from_training(tmp_path: Path, causal: bool) -> None:
    ends = []
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        made = trainer(tmp_path, causal, **options)
        made.train()
        ends.append(weights(made))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@both
def test_accumulated_batches_equal_one_large_one(tmp_path: Path, causal: bool) -> None:
    """The rows have different numbers of targets, so a mean of means would differ in the first digits."""
    common = {"logging_steps": 1, "max_steps": 4}
    large = trainer(tmp_path / "a", causal, tiny(causal, dropout=0.0), per_device_train_batch_size=8, **common)
    small = trainer(tmp_path / "b", causal, tiny(causal, dropout=0.0), gradient_accumulation_steps=4, **common)
    large.train()
    small.train()
    for whole, many in zip(curve(large), curve(small), strict=True):
        for name in ("loss", "grad_norm"):
            if name in whole:
                assert many[name] == pytest.approx(whole[name], rel=1e-5), (whole, many)  # fp32 sums in another order


@both
def test_evaluation_is_a_mean_over_tokens(tmp_path: Path, causal: bool) -> None:
    losses = []
    for batch in (1, 2, 5):
        made = trainer(tmp_path, causal, per_device_eval_batch_size=batch)
        losses.append(made.evaluate()["eval_loss"])
    assert losses[1:] == pytest.approx(losses[:2], rel=1e-6)
    model, rows, total, count = made.model.eval(), Rows(5, causal), 0.0, 0
    for row in range(5):
        item = rows[row]
        logits = model(input_ids=item["input_ids"][None]).logits[0].detach()
        targets = item["labels"]
        if causal:
            logits, targets = logits[:-1], targets[1:]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets != -100).sum())
    assert losses[0] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize(
    ("event", "last", "message"),
    [
        ("on_step_begin", 3, r"nan at step 4.*learning_rate"),
        # The update itself makes the weights so, after a loss that was still a number.
        ("on_step_end", 2, r"After step 3, .*checkpoint-3 was not written"),
    ],
)
def test_nan_names_the_step_and_is_never_saved(tmp_path: Path, event: str, last: int, message: str) -> None:
    @torch.no_grad()
    def poison(model: Any, **_: Any) -> None:
        next(model.parameters())[:] = float("nan")

    made = trainer(tmp_path, save_strategy="steps", save_steps=1, callbacks=[At(3, poison, event)])
    with pytest.raises(NonFiniteLossError, match=message):
        made.train()
    assert latest_complete_checkpoint(tmp_path) == tmp_path / f"checkpoint-{last}"
    assert not (tmp_path / f"checkpoint-{last + 1}").exists()


@pytest.mark.parametrize("failing", ["safetensors", "torch"])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path: Path, monkeypatch: Any, failing: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()

    def fail(content: Any, path: Any, *rest: Any, **more: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    target = "torch.save" if failing == "torch" else "transformers.modeling_utils.safe_save_file"
    made = trainer(tmp_path / "cut", **options, callbacks=[At(4, lambda **_: monkeypatch.setattr(target, fail))])
    with pytest.raises(SavingError, match=r"checkpoint-4 could not be written.*No space left.*Earlier checkpoints"):
        made.train()
    monkeypatch.undo()
    assert not (tmp_path / "cut/checkpoint-4").exists()
    checkpoint = latest_complete_checkpoint(tmp_path / "cut")
    assert checkpoint == tmp_path / "cut/checkpoint-2"
    again = trainer(tmp_path / "cut", **options)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert curve(again) == curve(whole)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer(folder, save_strategy="steps", save_steps=4).train()
    return folder


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_half_written_checkpoint_is_passed_over(
    saved: Path, tmp_path: Path, caplog: Any, name: str, damage: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run/checkpoint-8" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert latest_complete_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoint-4"
    assert "checkpoint-8" in caplog.text
    assert damage in caplog.text
    problem = incompleteness(tmp_path / "run/checkpoint-8", 1)
    assert problem is not None
    assert damage in problem


def test_a_checkpoint_of_one_process_is_none_for_two(saved: Path, caplog: Any) -> None:
    assert latest_complete_checkpoint(saved, world_size=1) == saved / "checkpoint-8"
    assert latest_complete_checkpoint(saved, world_size=2) is None
    assert "written by 1 process(es), not by 2" in caplog.text
    assert incompleteness(saved / "checkpoint-5", 1) == "the folder does not exist"


def test_an_earlier_attempt_at_a_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    stale = tmp_path / "checkpoint-4/rng_state_1.pth"
    stale.parent.mkdir()
    stale.write_bytes(b"stale")
    trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    assert not stale.exists()
    assert incompleteness(stale.parent, 1) is None


def test_settings_that_change_the_curve_are_named(tmp_path: Path) -> None:
    def settings(data: str = "a", **options: Any) -> dict[str, Any]:
        return checkpoint_settings(trainer(tmp_path / "unused", **options).args, data=data, theta=1.0)

    first = settings()
    free = settings(
        logging_steps=7, save_steps=9, eval_strategy="steps", eval_steps=2, run_name="b", save_total_limit=2
    )
    assert differences(first, free) == []
    assert differences(first, settings(learning_rate=2e-2)) == ["learning_rate was 0.01 and is now 0.02"]
    for option in ({"seed": 1}, {"max_steps": 9}, {"gradient_accumulation_steps": 2}, {"bf16": True}):
        assert [phrase.split()[0] for phrase in differences(first, settings(**option))] == list(option)
    assert differences(first, settings("b")) == ["data was 'a' and is now 'b'"]

    folder = tmp_path / "run"
    assert check_run(folder, first) is False
    write_json(folder / SETTINGS_FILE, first)
    assert check_run(folder, free) is True
    with pytest.raises(SettingsError, match=r"max_steps was 8 and is now 9; .*seed was 42 and is now 3.*--output_dir"):
        check_run(folder, settings(seed=3, max_steps=9))
    assert json.loads((folder / "run_settings.json").read_text())["theta"] == 1.0


def test_the_precision_of_accelerate_launch_is_a_setting(tmp_path: Path, monkeypatch: Any) -> None:
    plain = checkpoint_settings(trainer(tmp_path).args)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    launched = checkpoint_settings(trainer(tmp_path).args)
    assert differences(plain, launched) == ["mixed_precision was 'absent' and is now 'bf16'"]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(SettingsError, match="has no effect on a CPU"):
        check_trainer_arguments(trainer(tmp_path / "never").args)


def test_evaluation_may_not_change_where_it_chooses_the_model(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    few = checkpoint_settings(trainer(tmp_path, **best, eval_steps=4, save_steps=4).args)
    many = checkpoint_settings(trainer(tmp_path, **best, eval_steps=2, save_steps=2).args)
    assert [phrase.split()[0] for phrase in differences(few, many)] == ["eval_steps", "save_steps"]


def test_a_loss_hook_sees_the_batch_and_acts_in_training_only(tmp_path: Path) -> None:
    seen: list[float] = []

    def hook(inputs: Any, outputs: Any, loss: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        assert outputs.logits.shape[:2] == inputs["labels"].shape
        seen.append(float(items))
        return 0.0 * loss

    made = trainer(tmp_path, loss_hooks=[hook], gradient_accumulation_steps=2, max_steps=2, logging_steps=1)
    before = made.evaluate()["eval_loss"]
    made.train()
    assert len(seen) == 4
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert [entry["loss"] for entry in curve(made) if "loss" in entry] == [0.0, 0.0]
    assert before > 1
