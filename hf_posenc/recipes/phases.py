"""A scheme that changes while a model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching import patch_model, unpatch_model
from hf_posenc.patching.apply import build_encoding, current_encoding, unwrapped
from hf_posenc.patching.discovery import find_stacks
from hf_posenc.patching.encoding import parameter_count
from hf_posenc.patching.plan import SchemeLike, scheme_config
from hf_posenc.schemes.config import SchemeConfig

NATIVE = "native"


@dataclass(frozen=True)
class SchemePhases:
    """Which scheme a model has from which training step on.

    Args:
        phases: pairs of a first step and a scheme, in order, the first one at step 0. A scheme is given in any form
            that `patch_model` takes; "native" stands for the stock model.

    Raises:
        ValueError: if the phases do not begin at step 0, are not in order, or name an unknown scheme.
    """

    phases: tuple[tuple[int, SchemeLike], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple((int(step), scheme) for step, scheme in self.phases))
        if not self.phases or self.phases[0][0] != 0:
            raise ValueError(
                "Phases begin at step 0: give the scheme of the first steps too, 'native' for the model's own."
            )
        for (before, _), (after, _) in pairwise(self.phases):
            if after <= before:
                raise ValueError(f"Phases have to be in order of their first steps; {after} follows {before}.")
        for _, scheme in self.phases:
            if scheme != NATIVE:
                scheme_config(scheme, {})

    def at(self, step: int) -> SchemeLike:
        """The scheme in force at a training step, counted from 0."""
        return [scheme for first, scheme in self.phases if first <= step][-1]

    def apply(self, model: PreTrainedModel, step: int) -> bool:
        """Gives the model the scheme of a step, and says whether that changed anything. Call it before the step.

        Raises:
            UnsupportedError: for a later phase with learned parameters, which the optimizer at hand would not train.
        """
        scheme, encoding = self.at(step), current_encoding(unwrapped(model))
        if scheme == NATIVE:
            if encoding is None:
                return False
            unpatch_model(model)
            return True
        config = scheme_config(scheme, {})
        if encoding is not None and encoding.config == config:
            return False
        if step > 0:
            _refuse_new_parameters(model, config, step)
        patch_model(model, config)
        return True


def _refuse_new_parameters(model: PreTrainedModel, config: SchemeConfig, step: int) -> None:
    target = unwrapped(model)
    count = parameter_count(build_encoding(config, target, find_stacks(target)))
    if count:
        raise UnsupportedError(
            f"Scheme {config.name!r}, in force from step {step} on, has {count} parameters of its own, which an "
            "optimizer made before would not train. Begin a new training run with it."
        )


def drope(total_steps: int, recalibration: float = 0.12, scheme: SchemeLike = NATIVE) -> SchemePhases:
    """DroPE: train with positions, drop them, recalibrate (arXiv:2512.12167, section 4).

    Positions make training fast, and their absence makes it generalise to longer inputs; so they are dropped for the
    last part of the training. The paper recalibrates for 2 of 16.8 billion tokens (12 %), at the peak learning rate of
    the pretraining, with QK-norm where that rate is high.

    Args:
        total_steps: of the whole training.
        recalibration: share of them without positions.
        scheme: of the steps before; by default the model's own.

    Raises:
        ValueError: if either part would have no steps.
    """
    dropped = total_steps - round(total_steps * recalibration)
    if not 0 < dropped < total_steps:
        raise ValueError(
            f"Of {total_steps} steps a share of {recalibration} leaves {dropped} with positions and "
            f"{total_steps - dropped} without; both have to be at least one."
        )
    return SchemePhases(((0, scheme), (dropped, "none")))
