"""Schemes that change during training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerState

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching import unpatch_model
from hf_posenc.patching.anatomy.weights import parameter_count
from hf_posenc.patching.inspection import resolve_native
from hf_posenc.patching.patch import place_scheme, with_native_options
from hf_posenc.patching.place.encoding import scheme_in_part
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.recipes.gradual import plain_model
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.registry import SchemeLike, as_scheme

NATIVE = "native"


@dataclass(frozen=True)
class SchemePhases:
    """The schemes of a training run and the steps at which they start.

    Args:
        phases: pairs of a first step and a scheme, in order; the first pair has step 0. A scheme can have any form that
            `patch_model` accepts; "native" is the stock model.
        part: the part of a composite model that gets them, as in `patch_model`. Other parts are left alone.

    Raises:
        ValueError: if the phases are not pairs, do not begin at step 0, are not in order, contain an unknown scheme, or
            one that names several parts.
    """

    phases: tuple[tuple[int, SchemeLike], ...]
    part: str | None = None

    def __post_init__(self) -> None:
        for phase in self.phases:
            if not isinstance(phase, tuple | list) or len(phase) != 2 or not isinstance(phase[0], Integral):
                raise ValueError(
                    f"{phase!r} is not a phase; expected a first step and a scheme, such as (0, 'native')."
                )
        object.__setattr__(self, "phases", tuple((int(step), scheme) for step, scheme in self.phases))
        if not self.phases or self.phases[0][0] != 0:
            raise ValueError(
                "Phases must begin at step 0. Add the scheme of the first steps, for example 'native' for the "
                "model's own scheme."
            )
        for (before, _), (after, _) in pairwise(self.phases):
            if after <= before:
                raise ValueError(f"Phases must be in order of their first steps; {after} follows {before}.")
        for _, scheme in self.phases:
            if scheme != NATIVE and isinstance(as_scheme(scheme), PartsConfig):
                raise ValueError("Phases hold the schemes of one part of a model: name it with part=...")

    def at(self, step: int) -> SchemeLike:
        """Returns the scheme of a training step, counted from 0."""
        return [scheme for first, scheme in self.phases if first <= step][-1]

    def apply(self, model: PreTrainedModel, step: int) -> bool:
        """Patches the model with the scheme of a step. Returns whether the scheme changed. Call it before the step.

        Raises:
            UnsupportedError: for a later phase with learned parameters, which an existing optimizer would not train.
        """
        transaction, scheme = Transaction(model), self.at(step)
        part = transaction.anatomy.part(self.part)
        in_force = scheme_in_part(transaction.encoding, part)
        if scheme == NATIVE:
            if in_force is None:
                return False
            unpatch_model(model, part=part)
            return True
        stacks = transaction.anatomy.stacks([part])
        config = resolve_native(transaction, part, as_scheme(scheme), stacks)
        if in_force is not None and config.name == in_force.name:
            config = with_native_options(transaction, part, config, stacks)
        if in_force == config:
            return False
        count = parameter_count(transaction.plan_alone(config, stacks)) if step > 0 else 0
        if count:
            raise UnsupportedError(
                f"Scheme {config.name!r}, which starts at step {step}, has {count} parameters, which an existing "
                "optimizer would not train. Start a new training run with it."
            )
        place_scheme(transaction, config, part)
        return True


def drope(
    total_steps: int, recalibration: float = 0.12, scheme: SchemeLike = NATIVE, *, part: str | None = None
) -> SchemePhases:
    """Returns the phases of DroPE: train with positions, drop them, recalibrate (arXiv:2512.12167, section 4).

    Positions make training faster, but models without positions generalise better to longer inputs, so positions are
    dropped for the last part of the training. The paper recalibrates for 2 of 16.8 billion tokens (12 %), at the peak
    learning rate of the pretraining, with QK-norm if that rate is high.

    Args:
        total_steps: number of steps of the whole training.
        recalibration: fraction of the steps without positions.
        scheme: scheme of the steps before; by default the model's own.
        part: the part of a composite model whose positions are dropped, as in `patch_model`.

    Raises:
        ValueError: if either part would have no steps.
    """
    dropped = total_steps - (round(total_steps * recalibration) if 0 < recalibration < 1 else 0)
    if not 0 < dropped < total_steps:
        raise ValueError(
            f"With total_steps={total_steps} and recalibration={recalibration}, {dropped} steps have positions and "
            f"{total_steps - dropped} do not; both must be at least 1."
        )
    return SchemePhases(((0, scheme), (dropped, "none")), part)


class SchemePhasesCallback(TrainerCallback):
    """Applies the scheme of each training step: `Trainer(..., callbacks=[SchemePhasesCallback(phases)])`.

    Args:
        phases: the schemes and the optimizer steps at which they start.
    """

    def __init__(self, phases: SchemePhases) -> None:
        if not isinstance(phases, SchemePhases):
            raise TypeError(
                f"SchemePhasesCallback takes SchemePhases, for example drope(max_steps); got {type(phases).__name__}."
            )
        self.phases = phases

    def match_checkpoint(self, model: Any, step: int) -> None:
        """Applies the phase of a checkpoint saved after `step` steps, before it is loaded."""
        self.phases.apply(plain_model(model), max(step - 1, 0))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Applies the phase in which the training begins or resumes.

        Raises:
            ValueError: if the training ends before the last phase begins.
        """
        last, scheme = self.phases.phases[-1]
        if last >= state.max_steps:
            raise ValueError(
                f"The phase of {scheme!r} begins at step {last}, but this training ends after {state.max_steps} "
                "steps. Adapt the phases to the number of training steps."
            )
        self._apply(state, kwargs["model"], kwargs.get("optimizer"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Applies the phase of the step that is about to begin."""
        self._apply(state, kwargs["model"], kwargs.get("optimizer"))

    def _apply(self, state: TrainerState, model: Any, optimizer: Any) -> None:
        model = plain_model(model)
        if self.phases.apply(model, state.global_step):
            _check_trained(model, optimizer, state.global_step)


def _check_trained(model: Any, optimizer: Any, step: int) -> None:
    """Refuses an optimizer that lacks a parameter which is trained from now on."""
    groups = [] if optimizer is None else optimizer.param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A wrapper that flattens parameters has other parameters than the model, so this cannot be checked.
    if not held & set(trained.values()):
        return
    missing = [name for name, identity in trained.items() if identity not in held]
    if missing:
        raise UnsupportedError(
            f"From step {step} on, {missing[0]} ({len(missing)} parameters in total) would have to be trained, but "
            "they are not in the optimizer of the Trainer. Patch the model with the scheme of the first phase before "
            "you create the Trainer, and use schemes without parameters in later phases. A phase that returns to "
            "'native' needs a model whose position table was trained from the start."
        )
