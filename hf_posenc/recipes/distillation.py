"""Learning from the model as it was: losses between a model with another scheme and its teacher."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.patching.place.in_force import current_encoding
from hf_posenc.patching.place.refusals import unwrapped

ModelType = TypeVar("ModelType", bound=nn.Module)

#: The label of a token that is no target, in transformers.
IGNORED = -100


def frozen_teacher(model: ModelType) -> ModelType:
    """A copy of a model to learn from: in evaluation mode, without gradients. Make it before the swap.

    It is a copy even where the weights stay the same (LoRA): taking the scheme out and putting it back around every
    step would forget what gradient checkpointing needs, and cannot be done under DDP or torch.compile.

    Args:
        model: the model as it is; a scheme it already has stays part of what is taught.
    """
    current_encoding(unwrapped(model))  # Refuses what is no model, or was patched in parts.
    teacher = copy.deepcopy(model)
    teacher.requires_grad_(False)
    teacher.eval()
    return teacher


def soft_target_loss(
    student_logits: Tensor, teacher_logits: Tensor, chosen: Tensor, temperature: float = 2.0
) -> Tensor:
    """The divergence of a student's predictions from its teacher's, summed over tokens (arXiv:1503.02531, section 2).

    `T ** 2 * KL(softmax(teacher / T) || softmax(student / T))`: the factor keeps gradients as large as those of the
    cross-entropy beside it.

    Args:
        student_logits: `(batch, length, vocabulary)`.
        teacher_logits: the same shape.
        chosen: `(batch, length)` bool, the tokens whose predictions count.
        temperature: `T`, greater than 0.

    Returns:
        A sum over the chosen tokens, in nats, float32.
    """
    student = functional.log_softmax(student_logits[chosen].float() / temperature, dim=-1)
    teacher = functional.log_softmax(teacher_logits[chosen].float() / temperature, dim=-1)
    return functional.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2


def mean_pooled(hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """`(batch, length, hidden)` -> `(batch, hidden)`: the mean over real tokens, as sentence-transformers pools."""
    if attention_mask is None:
        return hidden_states.mean(1)
    weights = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
    return (hidden_states * weights).sum(1) / weights.sum(1).clamp(min=1)


def hidden_state_loss(
    student: Tensor, teacher: Tensor, attention_mask: Tensor | None = None, embedding_weight: float = 1.0
) -> Tensor:
    """How far the last hidden states and their mean are from a teacher's: for encoders without a head.

    Both are mean squared errors in units of the teacher's variance, so 1 is as bad as a constant.

    Args:
        student: `(batch, length, hidden)`.
        teacher: the same shape.
        attention_mask: `(batch, length)`, 1 for real tokens; all by default.
        embedding_weight: of the pooled embeddings beside the hidden states.
    """
    student, teacher = student.float(), teacher.float()
    mask = torch.ones(student.shape[:2], device=student.device) if attention_mask is None else attention_mask
    real = mask.bool()
    variance = teacher[real].var(0).sum().clamp(min=torch.finfo(torch.float32).tiny)
    tokens = (student[real] - teacher[real]).square().sum(-1).mean() / variance
    pooled = (mean_pooled(student, mask) - mean_pooled(teacher, mask)).square().sum(-1).mean() / variance
    return tokens + embedding_weight * pooled


class Distillation:
    """Adds what a teacher predicts to a language model's loss: `(1 - weight) * loss + weight * soft_target_loss`.

    Called inside `Trainer.compute_loss`, or as one of the `loss_hooks` of `training.trainer.SchemeTrainer`.

    Args:
        teacher: from `frozen_teacher`.
        causal: whether a place predicts the token after it, rather than its own.
        temperature: of `soft_target_loss`.
        weight: between 0 and 1; 1 leaves the labels out.

    Raises:
        ValueError: for a temperature or a weight out of range, or a teacher that would be trained.
    """

    def __init__(self, teacher: nn.Module, *, causal: bool, temperature: float = 2.0, weight: float = 0.5) -> None:
        if not temperature > 0:
            raise ValueError(f"Distillation.temperature is {temperature!r}; expected a number greater than 0.")
        if not 0 < weight <= 1:
            raise ValueError(f"Distillation.weight is {weight!r}; expected more than 0 and at most 1.")
        if any(parameter.requires_grad for parameter in teacher.parameters()):
            raise ValueError(
                "The teacher has trainable parameters. Make it with frozen_teacher(model), before the swap."
            )
        self.teacher = teacher
        self.causal = causal
        self.temperature = temperature
        self.weight = weight

    def __call__(self, inputs: Mapping[str, Any], outputs: Any, loss: Tensor, num_items: Tensor | int) -> Tensor:
        """The loss to train on.

        Args:
            inputs: of the model, "labels" included; the teacher gets the same without them.
            outputs: what the student returned, with `logits`.
            loss: the student's own.
            num_items: how many targets the whole update has, which the sum over tokens is divided by.
        """
        labels = inputs["labels"]
        given = {name: value for name, value in inputs.items() if name != "labels"}
        if next(self.teacher.parameters()).device != outputs.logits.device:
            self.teacher.to(outputs.logits.device)
        with torch.no_grad():
            taught = self.teacher(**given).logits
        student, chosen = outputs.logits, labels != IGNORED
        if self.causal:
            student, taught, chosen = student[:, :-1], taught[:, :-1], chosen[:, 1:]
        from_teacher = soft_target_loss(student, taught, chosen, self.temperature) / num_items
        return loss * (1 - self.weight) + from_teacher * self.weight
