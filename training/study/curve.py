"""The loss curve of a training, kept in the trainer's own log, which its checkpoints hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

#: What is evaluated while training, and what results call it.
EVALUATED = {"eval_loss": "validation_loss", "eval_similarity": "validation_similarity"}
#: Called after every step with the number of steps that are done.
OnStep = Callable[[int], None]


class CurveCallback(TrainerCallback):
    """Reports each step, and asks for a point of the curve every `every` steps and at the end.

    Beside each point stands the time it took to get there; a resumed run goes on with it.

    Args:
        every: steps between points.
        on_step: told of each step.
    """

    def __init__(self, every: int, on_step: OnStep) -> None:
        self.every = every
        self.on_step = on_step
        self.trainer: Trainer | None = None
        self._earlier = self._started = (0.0, 0.0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes over the clock of the run that is resumed."""
        points = [entry for entry in state.log_history if "seconds" in entry]
        self._earlier = (points[-1]["seconds"], points[-1]["cpu_seconds"]) if points else (0.0, 0.0)
        self._started = (time.monotonic(), time.process_time())
        self.on_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a point where one is due."""
        if self.trainer is None:
            raise RuntimeError("CurveCallback.trainer has to be set before the training begins.")
        self.on_step(state.global_step)
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            now = (time.monotonic(), time.process_time())
            wall, processor = (
                before + end - start for before, start, end in zip(self._earlier, self._started, now, strict=True)
            )
            self.trainer.log({"seconds": wall, "cpu_seconds": processor})
            # Asked for last, because a log of any kind counts as the one that is due.
            control.should_log = control.should_evaluate = True


def recorded_curve(state: TrainerState) -> dict[str, list[Any]]:
    """Steps, the mean training loss since the point before (`None` before the first step), and what was evaluated."""
    values: dict[str, dict[int, float]] = {
        name: {entry["step"]: entry[name] for entry in state.log_history if name in entry}
        for name in ("loss", *EVALUATED)
    }
    (name,) = (name for name in EVALUATED if values[name])
    steps = sorted(values[name])
    losses = [values["loss"].get(step) for step in steps]
    return {
        "step": steps,
        "train_loss": [None if loss is None else round(float(loss), 4) for loss in losses],
        EVALUATED[name]: [round(float(values[name][step]), 4) for step in steps],
    }


def recorded_seconds(state: TrainerState) -> dict[str, float]:
    """Wall and processor seconds of the whole training, those before an interruption included."""
    last = [entry for entry in state.log_history if "seconds" in entry][-1]
    return {"seconds": round(last["seconds"], 3), "cpu_seconds": round(last["cpu_seconds"], 3)}
