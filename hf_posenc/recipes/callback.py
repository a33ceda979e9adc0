"""Phases inside `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.recipes.phases import SchemePhases


class SchemePhasesCallback(TrainerCallback):
    """Gives the model the scheme of each training step: `Trainer(..., callbacks=[SchemePhasesCallback(phases)])`.

    Args:
        phases: which scheme from which optimizer step on.
    """

    def __init__(self, phases: SchemePhases) -> None:
        self.phases = phases

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Applies the phase the training begins, or resumes, in."""
        self._apply(state, kwargs["model"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Applies the phase of the step about to begin."""
        self._apply(state, kwargs["model"])

    def _apply(self, state: TrainerState, model: Any) -> None:
        from accelerate.utils import extract_model_from_parallel

        self.phases.apply(extract_model_from_parallel(model), state.global_step)
