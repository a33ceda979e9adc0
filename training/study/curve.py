"""The loss curve of a training, kept in the trainer's own log, which its checkpoints hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes over the clock of the run that is resumed."""
        earlier = recorded_seconds(state)
        self._offsets = (earlier["seconds"] - time.monotonic(), earlier["cpu_seconds"] - time.process_time())
        self.on_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
    values: dict[str, dict[int, float]] = {
        name: {entry["step"]: entry[name] for entry in state.log_history if name in entry}
        for name in ("loss", *EVALUATED)
    }
    steps = sorted(next(points for name in EVALUATED if (points := values[name])))
    losses = [values["loss"].get(step) for step in steps]
    curve = {
        "step": steps,
        "train_loss": [None if loss is None else round(float(loss), 4) for loss in losses],
    } | {
        title: [round(float(values[name][step]), 4) for step in steps]
        for name, title in EVALUATED.items()
        if values[name]
    }
    return {"curve": curve} | {key: round(value, 3) for key, value in recorded_seconds(state).items()}
