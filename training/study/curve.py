"""The loss curve of a training, kept in the trainer's own log, which is part of its checkpoints; and other trackers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from training.errors import settings_errors
from training.study.settings import StudySettings

#: Metrics that are evaluated during training, and their names in results.
EVALUATED = {f"eval_{name}": f"validation_{name}" for name in ("loss", "similarity", "accuracy")}
#: Called after every step with the number of completed steps.
OnStep = Callable[[int], None]


class CurveCallback(TrainerCallback):
    """Reports each step, and adds a point to the curve every `every` steps and at the end.

    Each point has the time that was needed to get there. A resumed run continues the time.

    Args:
        every: number of steps between points.
        on_step: called after each step.
    """

    trainer: Trainer

    def __init__(self, every: int, on_step: OnStep) -> None:
        self.every, self.on_step = every, on_step
        self._offsets = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continues the clock of a resumed run."""
        earlier = recorded_seconds(state)
        self._offsets = (earlier["seconds"] - time.monotonic(), earlier["cpu_seconds"] - time.process_time())
        self.on_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds a point if one is due."""
        self.on_step(state.global_step)
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            wall, processor = self._offsets
            self.trainer.log({"seconds": wall + time.monotonic(), "cpu_seconds": processor + time.process_time()})
            # Set last, because any other log would count as this one.
            control.should_log = control.should_evaluate = True


def recorded_seconds(state: TrainerState) -> dict[str, float]:
    """Returns wall and processor seconds up to the last point, including those before an interruption."""
    points = [entry for entry in state.log_history if "seconds" in entry]
    return {name: points[-1][name] if points else 0.0 for name in ("seconds", "cpu_seconds")}


def recorded_curve(state: TrainerState) -> dict[str, Any]:
    """Returns the curve of a finished training and the time it took, JSON-ready.

    The training loss is the mean since the previous point; `None` before the first step, and empty without any steps.
    """
    points: dict[int, dict[str, Any]] = {}
    for entry in state.log_history:
        points.setdefault(entry["step"], {}).update(entry)
    evaluated = {step: point for step, point in sorted(points.items()) if EVALUATED.keys() & point.keys()}
    curve: dict[str, list[Any]] = {"step": list(evaluated), "train_loss": []}
    for name, title in {"loss": "train_loss", **EVALUATED}.items():
        values = [point.get(name) for point in evaluated.values()]
        if any(value is not None for value in values):
            curve[title] = [None if value is None else round(float(value), 4) for value in values]
    return {"curve": curve} | {key: round(value, 3) for key, value in recorded_seconds(state).items()}


def check_trackers(study: StudySettings) -> None:
    """Raises `SettingsError` for an unknown or missing tracker, before the training."""
    names = study.report_to
    with settings_errors("--report_to", ValueError, ImportError, RuntimeError):
        # A single name may be "all" or "none".
        for callback in get_reporting_integration_callbacks(names[0] if len(names) == 1 else names):
            callback()


def finish_trackers(arguments: TrainingArguments) -> None:
    """Closes trackers that `Trainer` leaves open, so that the next training of this process gets a new run."""
    if "wandb" in arguments.report_to:
        import wandb

        wandb.finish()
