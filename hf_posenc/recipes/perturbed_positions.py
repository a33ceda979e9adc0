"""Self-distillation with perturbed positions: predictions that depend less on where tokens stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.recipes.distillation import IGNORED, check_same_shape
from hf_posenc.recipes.position_views import PositionViews
from hf_posenc.recipes.skipped_positions import check_shift, perturbed_positions
from hf_posenc.schemes.validation import check_number


def reverse_divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Computes `KL(student || teacher)` of each token, which is the reverse KL (arXiv:2604.14339, section 2).

    Args:
        student_logits: `(tokens, vocabulary)`.
        teacher_logits: the same shape.

    Returns:
        `(tokens,)` float32, in nats.

    Raises:
        ValueError: for logits of different shapes.
    """
    check_same_shape(student_logits, teacher_logits)
    student = functional.log_softmax(student_logits.float(), dim=-1)
    teacher = functional.log_softmax(teacher_logits.float(), dim=-1)
    return (student.exp() * (student - teacher)).sum(-1)


class PerturbedSelfDistillation:
    """Adds to a causal language model's loss how much its predictions change with the positions of its tokens
    (RoPE-Perturbed Self-Distillation, arXiv:2604.14339, section 2).

    The same tokens go through the same model a second time, with `perturbed_positions` and the same causal mask. The
    loss becomes `loss + weight * mean KL(perturbed view || standard view)`. As in the paper, the mean of a row is over
    the tokens whose positions changed, and the standard view is the teacher, through which no gradient flows. Choices
    made here: no temperature and no warm-up, only tokens whose label counts take part, rows are weighted by their
    number of such tokens (equal rows: the mean over rows), and each view has its own dropout.

    Called inside `Trainer.compute_loss`, or as one of the `loss_hooks` of `training.trainer.SchemeTrainer`. A step has
    two forward passes and keeps the activations of both. The authors report about 1.6 times the time per step.

    The first call checks that positions change the predictions of this model, but not which tokens it attends to, and
    that a token still sees the tokens before a jump of the positions.

    Args:
        model: the model that is trained, with its LoRA adapters but not wrapped for DDP. In a composite model, the text
            part.
        weight: `lambda` of the paper, above 0. The paper uses 1, and reports the best results between 0.5 and 1.
        shift: "skip" or "cyclic", see `perturbed_positions`. The authors prefer "skip" where order matters.
        largest_skip: of `perturbed_positions`. A model with a learned table also limits it.
        generator: of `perturbed_positions`.

    Raises:
        ValueError: for a weight or a skip out of range.
        UnknownNameError: for an unknown shift.
        UnsupportedError: for a model that takes no `position_ids`; for "cyclic" with a scheme that treats a wrap of the
            positions as the start of another document.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 1.0,
        shift: str = "skip",
        largest_skip: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_shift(shift, largest_skip, "PerturbedSelfDistillation.")
        self.views = PositionViews(model)
        if shift == "cyclic":
            self.views.refuse_wrapping()
        self.weight = weight
        check_number(self, "weight", above=0)
        self.shift = shift
        self.largest_skip = largest_skip
        self.generator = generator

    def __call__(self, inputs: Mapping[str, Any], outputs: Any, loss: Tensor, num_items: Tensor | int) -> Tensor:
        """Returns the training loss.

        Args:
            inputs: inputs of the model, including "labels". Rows may be padded behind their last token, or contain
                several documents whose `position_ids` restart.
            outputs: outputs of the standard view, with `logits`.
            loss: the model's own loss.
            num_items: number of targets in the whole update, by which the sum over tokens is divided.

        Raises:
            UnsupportedError: if other positions change nothing in this model, if they change which tokens it attends
                to, or for inputs whose positions cannot be perturbed.
            SequenceLengthError: for rows that fill all positions of the model.
        """
        view = self.views.of(inputs, outputs.logits)
        positions = perturbed_positions(
            view.positions,
            shift=self.shift,
            largest_skip=self.largest_skip,
            limit=self.views.limit(),
            real=view.real,
            generator=self.generator,
        )
        targets = (inputs["labels"] != IGNORED).to(positions.device)[:, 1:]
        chosen = targets & (positions != view.positions)[:, :-1]
        perturbed = self.views.logits(view, positions)[:, :-1][chosen]
        standard = outputs.logits.detach()[:, :-1][chosen]
        # A row is weighted by its number of targets, even if its mean is over some of them.
        share = targets.sum(-1) / chosen.sum(-1).clamp(min=1)
        changed = (reverse_divergence(perturbed, standard) * share[chosen.nonzero()[:, 0]]).sum()
        return loss + self.weight * changed / num_items
