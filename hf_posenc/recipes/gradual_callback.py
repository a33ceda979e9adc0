"""Gradual swaps inside `transformers.Trainer`."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.recipes.gradual import blend_strength, finish_blend, set_blend_strength


class GradualSwapCallback(TrainerCallback):
    """Raises the strength of a model's new scheme step by step, and leaves the model with that scheme alone.

    Before optimizer step `n`, counted from 0, the strength becomes `min(1, (n + 1) / steps)`. It follows from the step
    alone, so a resumed run goes on where it was. When the training ends, the old scheme is taken out::

        swap_scheme(model, "alibi", gradual=True)
        Trainer(model, ..., callbacks=[GradualSwapCallback(steps=200)]).train()
        model.save_pretrained(...)  # a model with "alibi"

    A checkpoint written on the way holds the blend at the strength it had, which `from_pretrained` loads as such.

    Args:
        steps: after how many optimizer steps the new scheme stands alone; the training may go on from there.

    Raises:
        ValueError: for less than one step.
    """

    def __init__(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(
                f"GradualSwapCallback.steps is {steps!r}; expected a number of optimizer steps, 1 or more."
            )
        self.steps = steps

    def strength(self, step: int) -> float:
        """The strength during an optimizer step, counted from 0."""
        return min(1.0, (step + 1) / self.steps)

    def match_checkpoint(self, model: Any, step: int) -> None:
        """Sets the strength of a checkpoint that was saved after so many steps, before it is loaded."""
        if blend_strength(_unwrapped(model)) is not None:
            set_blend_strength(_unwrapped(model), self.strength(step - 1))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the strength of the last step that was done, so that a first evaluation sees the model it left.

        Raises:
            ValueError: if the training ends before the new scheme stands alone, or may pick a best checkpoint from
                before that.
            UnsupportedError: if the model is no blend.
        """
        if state.max_steps < self.steps:
            raise ValueError(
                f"The new scheme stands alone after {self.steps} steps, and this training ends after "
                f"{state.max_steps}. Give fewer gradual steps, or train longer."
            )
        if args.load_best_model_at_end and (args.eval_delay or 0) < self.steps:
            raise ValueError(
                f"load_best_model_at_end may choose a checkpoint from the first {self.steps} steps, in which the old "
                f"scheme still acts and which is no model of the new one. Set eval_delay={self.steps}, or leave it out."
            )
        set_blend_strength(_unwrapped(kwargs["model"]), self.strength(state.global_step - 1))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the strength of the step about to begin."""
        set_blend_strength(_unwrapped(kwargs["model"]), self.strength(state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the old scheme out, unless the training was stopped before its share was gone."""
        model = _unwrapped(kwargs["model"])
        strength = blend_strength(model)
        if strength == 1:
            finish_blend(model)
            return
        warnings.warn(
            f"The training stopped after {state.global_step} of {self.steps} gradual steps, so the model stays a blend "
            f"with strength {strength}. Go on training, or jump with set_blend_strength(model, 1.0) and "
            "finish_blend(model).",
            UserWarning,
            stacklevel=2,
        )


def _unwrapped(model: Any) -> Any:
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model)
