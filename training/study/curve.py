"""The loss curve of a training, kept in the trainer's own log, which its checkpoints hold; and other trackers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from training.errors import SettingsError
from training.study.settings import StudySettings

#: What is evaluated during training, and what results call it.
EVALUATED = {
    "eval_loss": "validation_loss", "eval_similarity": "validation_similarity", "eval_accuracy": "validation_accuracy",
}  # fmt: skip
#: Called after every step with the number of steps that are done.
OnStep = Callable[[int], None]


class CurveCallback(TrainerCallback):
    """Reports each step, and asks for a point of the curve every `every` steps and at the end.

    Beside each point stands the time it took to get there; a resumed run goes on with it.

    Args:
        every: steps between points.
        on_step: told of each step.
    """

    trainer: Trainer

    def __init__(self, every: int, on_step: OnStep) -> None:
        self.every, self.on_step = every, on_step
        self._offsets = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes over the clock of the run that is resumed."""
        earlier = recorded_seconds(state)
        self._offsets = (earlier["seconds"] - time.monotonic(), earlier["cpu_seconds"] - time.process_time())
        self.on_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a point where one is due."""
        self.on_step(state.global_step)
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            wall, processor = self._offsets
            self.trainer.log({"seconds": wall + time.monotonic(), "cpu_seconds": processor + time.process_time()})
            # Asked for last, because a log of any kind counts as the one that is due.
            control.should_log = control.should_evaluate = True


def recorded_seconds(state: TrainerState) -> dict[str, float]:
    """Wall and processor seconds of the training up to its last point, those before an interruption included."""
    points = [entry for entry in state.log_history if "seconds" in entry]
    return {name: points[-1][name] if points else 0.0 for name in ("seconds", "cpu_seconds")}


def recorded_curve(state: TrainerState) -> dict[str, Any]:
    """The curve of a finished training and the time it took, JSON-ready.

    The training loss is the mean since the point before, `None` before the first step.
    """
    points: dict[int, dict[str, Any]] = {}
    for entry in state.log_history:
        points.setdefault(entry["step"], {}).update(entry)
    evaluated = {step: point for step, point in sorted(points.items()) if EVALUATED.keys() & point.keys()}
    curve: dict[str, list[Any]] = {"step": list(evaluated)}
    for name, title in {"loss": "train_loss", **EVALUATED}.items():
        values = [point.get(name) for point in evaluated.values()]
        if name == "loss" or any(value is not None for value in values):
            curve[title] = [None if value is None else round(float(value), 4) for value in values]
    return {"curve": curve} | {key: round(value, 3) for key, value in recorded_seconds(state).items()}


def check_trackers(study: StudySettings) -> None:
    """Refuses a tracker that does not exist or is not installed, before anything is trained."""
    names = study.report_to
    try:
        # A single word may be "all" or "none".
        for callback in get_reporting_integration_callbacks(names[0] if len(names) == 1 else names):
            callback()
    except (ValueError, ImportError, RuntimeError) as error:
        raise SettingsError(f"--report_to: {error}") from error


def finish_trackers(arguments: TrainingArguments) -> None:
    """Closes what `Trainer` leaves open, so that the next training of this process has a run of its own."""
    if "wandb" in arguments.report_to:
        import wandb

        wandb.finish()
