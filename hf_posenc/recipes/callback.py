"""Phases inside `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import UnsupportedError
from hf_posenc.recipes.phases import SchemePhases


class SchemePhasesCallback(TrainerCallback):
    """Gives the model the scheme of each training step: `Trainer(..., callbacks=[SchemePhasesCallback(phases)])`.

    Args:
        phases: which scheme from which optimizer step on.
    """

    def __init__(self, phases: SchemePhases) -> None:
        if not isinstance(phases, SchemePhases):
            raise TypeError(
                f"SchemePhasesCallback takes SchemePhases, for example drope(max_steps); got {type(phases).__name__}."
            )
        self.phases = phases

    def match_checkpoint(self, model: Any, step: int) -> None:
        """Gives the model the phase of a checkpoint that was saved after so many steps, before it is loaded."""
        from accelerate.utils import extract_model_from_parallel

        self.phases.apply(extract_model_from_parallel(model), max(step - 1, 0))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Applies the phase the training begins, or resumes, in.

        Raises:
            ValueError: if the training ends before the last phase begins.
        """
        last, scheme = self.phases.phases[-1]
        if last >= state.max_steps:
            raise ValueError(
                f"The phase of {scheme!r} begins at step {last}, but this training ends after {state.max_steps} steps "
                "and would never reach it. Make the phases for the number of steps the training has."
            )
        self._apply(state, kwargs["model"], kwargs.get("optimizer"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Applies the phase of the step about to begin."""
        self._apply(state, kwargs["model"], kwargs.get("optimizer"))

    def _apply(self, state: TrainerState, model: Any, optimizer: Any) -> None:
        from accelerate.utils import extract_model_from_parallel

        model = extract_model_from_parallel(model)
        if self.phases.apply(model, state.global_step):
            _check_trained(model, optimizer, state.global_step)


def _check_trained(model: Any, optimizer: Any, step: int) -> None:
    """Requires that the optimizer, made before, holds every parameter that is trained from now on.

    Raises:
        UnsupportedError: naming the first that it does not hold.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A wrapper that flattens parameters holds others than the model's; it cannot be looked into.
    if not held & set(trained.values()):
        return
    missing = [name for name, identity in trained.items() if identity not in held]
    if missing:
        raise UnsupportedError(
            f"From step {step} on, {missing[0]} ({len(missing)} parameters in all) would have to be trained, but the "
            "Trainer made its optimizer before they could be. Patch the model with the scheme of the first phase "
            "before the Trainer is made, and give later phases schemes without parameters; a phase that goes back to "
            "'native' needs a model whose position table was trained from the start."
        )
