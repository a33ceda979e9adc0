"""Options for how a trained model gets another scheme and recovers from the swap, and what they add to a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from hf_posenc.recipes import Distillation, GradualSwapCallback, PerturbedSelfDistillation, Swap, swap_scheme
from hf_posenc.recipes.initialization.parts import TABLE_EXTENSIONS
from hf_posenc.recipes.skipped_positions import SHIFTS
from hf_posenc.recipes.swap import INITIALIZATIONS
from training.arguments import check_effects, require, require_at_least
from training.errors import SettingsError, settings_errors
from training.trainer import LossHook

#: Number of rows of training text for fitting initial parameters.
SAMPLE_ROWS = 8


@dataclass
class HealingArguments:
    """How a pretrained model gets its scheme and recovers from the swap."""

    _argument_group_name = "recovery of a pretrained model"

    initialization: str = HfArg(
        default="default",
        help="Initial parameters of the scheme: 'fitted' to the effect of the old scheme on training text; 'auto' the "
        "same if there is anything to fit; 'default' as in a new model.",
        metadata={"choices": list(INITIALIZATIONS)},
    )
    table_extension: str | None = HfArg(
        default=None,
        help="How to fill the new rows of a fitted table that is longer than the old one.",
        metadata={"choices": list(TABLE_EXTENSIONS)},
    )
    gradual_steps: int = HfArg(
        default=0, help="Blend from the old scheme to the new one over this many steps; 0 switches at once."
    )
    distill: bool = HfArg(default=False, help="Also learn from the model before the swap, as a teacher.")
    distill_temperature: float = HfArg(default=2.0, help="Temperature that softens the teacher's predictions.")
    distill_weight: float = HfArg(
        default=0.5, help="The teacher's share of the loss, above 0; 1 ignores the tokens of the text."
    )
    self_distill: bool = HfArg(
        default=False, help="Learn to make the same predictions from perturbed positions (causal models)."
    )
    self_distill_weight: float = HfArg(
        default=1.0, help="Weight of the divergence between both predictions in the loss; above 0."
    )
    self_distill_shift: str = HfArg(
        default="skip",
        help="How to perturb positions: 'skip' moves the rest of a text further away, 'cyclic' rotates all positions.",
        metadata={"choices": list(SHIFTS)},
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            choices, value = option.metadata.get("choices"), getattr(self, option.name)
            if choices and value not in (option.default, *choices):
                raise SettingsError(f"--{option.name} is {value!r}; choose from {', '.join(choices)}.")
        require_at_least(self, gradual_steps=0)
        require("more than 0", self, distill_temperature=self.distill_temperature > 0)
        require("more than 0 and at most 1", self, distill_weight=0 < self.distill_weight <= 1)
        require("a number above 0", self, self_distill_weight=0 < self.self_distill_weight < math.inf)
        check_effects(self)

    @property
    def swaps(self) -> bool:
        """Whether any option other than a plain swap is set."""
        return self.initialization != "default" or self.gradual_steps > 0

    @property
    def teaches(self) -> bool:
        """Whether the model learns from predictions, its own or a teacher's."""
        return self.distill or self.self_distill

    def check_run(self, arguments: TrainingArguments, steps: int, lora: bool) -> None:
        """Like `check_training`, for a run with these arguments of the Trainer."""
        self.check_training(steps, lora)
        with settings_errors(f"--gradual_steps {self.gradual_steps}", ValueError):
            for callback in self.callbacks():
                callback.check_training(arguments, steps)

    def check_training(self, steps: int, lora: bool) -> None:
        """Raises `SettingsError` if the training ends before the old scheme is gone, or cannot follow the change."""
        if self.gradual_steps and lora:
            raise SettingsError(
                "--gradual_steps changes the scheme around the frozen weights in every step, which --lora cannot "
                "follow. Use only one of them."
            )
        if self.gradual_steps > steps:
            raise SettingsError(
                f"--gradual_steps is {self.gradual_steps}, but the training ends after {steps} steps, when the old "
                "scheme still has a share. Give fewer gradual steps, or train longer."
            )

    def swap(self, model: Any, scheme: Any, sample: Tensor | None, options: dict[str, Any]) -> Swap[Any]:
        """Gives a trained model another scheme. If `scheme` is a name, options can be taken from the old scheme."""
        return swap_scheme(
            model,
            scheme,
            initialization=self.initialization,
            sample=sample,
            table_extension=self.table_extension,
            gradual=self.gradual_steps > 0,
            **options,
        )

    def settings(self) -> dict[str, Any]:
        """The settings that must be the same in a resumed run."""
        given = asdict(self) if self.swaps or self.teaches else {}
        return {f"healing.{name}": value for name, value in given.items()}

    def callbacks(self) -> list[GradualSwapCallback]:
        """Returns the Trainer callbacks that increase the share of the new scheme."""
        return [GradualSwapCallback(self.gradual_steps)] if self.gradual_steps else []

    def loss_hooks(self, model: Any, teacher: Any, causal: bool) -> list[LossHook]:
        """Returns the loss hooks for the predictions of a teacher, and for those from perturbed positions."""
        hooks: list[LossHook] = []
        if teacher is not None:
            temperature, weight = self.distill_temperature, self.distill_weight
            hooks.append(Distillation(teacher, causal=causal, temperature=temperature, weight=weight))
        if self.self_distill:
            weight, shift = self.self_distill_weight, self.self_distill_shift
            hooks.append(PerturbedSelfDistillation(model, weight=weight, shift=shift))
        return hooks


def sample_rows(rows: Any) -> Tensor:
    """Returns rows spread over a training set, `(rows, length)`, for fitting initial parameters."""
    count = min(SAMPLE_ROWS, len(rows))
    return torch.stack([rows[index * len(rows) // count]["input_ids"] for index in range(count)])
