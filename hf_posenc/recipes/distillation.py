"""Distillation from the original model into a model with another scheme."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.schemes.validation import check_number

ModelType = TypeVar("ModelType", bound=nn.Module)

#: The label of tokens that are not targets, in transformers.
IGNORED = -100


def frozen_teacher(model: ModelType) -> ModelType:
    """Returns a frozen copy of a model in evaluation mode, to use as a teacher. Call it before the swap.

    A copy is needed even if the weights do not change (LoRA). Removing and restoring the scheme around every step would
    break gradient checkpointing, and is not possible with DDP or torch.compile.

    Args:
        model: the model before the swap; if it is patched, the teacher keeps its scheme.
    """
    current_encoding(unwrapped(model))  # Raises for anything that is not a model, and for partly patched models.
    teacher = copy.deepcopy(model)
    teacher.requires_grad_(False)
    teacher.eval()
    return teacher


def check_same_shape(student: Tensor, teacher: Tensor) -> None:
    """Raises `ValueError` for outputs that would be broadcast to one another."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"The outputs of the student have the shape {tuple(student.shape)} and those of the teacher "
            f"{tuple(teacher.shape)}. Both need the same tokens, and a vocabulary or hidden states of the same size."
        )


def soft_target_loss(
    student_logits: Tensor, teacher_logits: Tensor, chosen: Tensor, temperature: float = 2.0
) -> Tensor:
    """Computes the divergence of a student's predictions from its teacher's, summed over tokens (arXiv:1503.02531,
    section 2).

    `T ** 2 * KL(softmax(teacher / T) || softmax(student / T))`: the factor keeps gradients comparable to those of the
    cross-entropy.

    Args:
        student_logits: `(batch, length, vocabulary)`.
        teacher_logits: the same shape.
        chosen: `(batch, length)`, true or 1 for the tokens to include.
        temperature: `T`, greater than 0.

    Returns:
        A sum over the chosen tokens, in nats, float32.

    Raises:
        ValueError: for logits of different shapes.
    """
    check_same_shape(student_logits, teacher_logits)
    chosen = chosen.bool()
    student = functional.log_softmax(student_logits[chosen].float() / temperature, dim=-1)
    teacher = functional.log_softmax(teacher_logits[chosen].float() / temperature, dim=-1)
    return functional.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2


def mean_pooled(hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Computes the mean over real tokens: `(batch, length, hidden)` -> `(batch, hidden)`."""
    if attention_mask is None:
        return hidden_states.mean(1)
    weights = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
    return (hidden_states * weights).sum(1) / weights.sum(1).clamp(min=1)


def hidden_state_loss(
    student: Tensor, teacher: Tensor, attention_mask: Tensor | None = None, embedding_weight: float = 1.0
) -> Tensor:
    """Compares the last hidden states and their mean with a teacher's, for encoders without a head.

    Both are mean squared errors relative to the teacher's variance, so a constant prediction has a loss of 1.

    Args:
        student: `(batch, length, hidden)`.
        teacher: the same shape.
        attention_mask: `(batch, length)`, 1 for real tokens; all by default.
        embedding_weight: weight of the loss of the pooled embeddings.

    Raises:
        ValueError: for hidden states of different shapes.
    """
    check_same_shape(student, teacher)
    student, teacher = student.float(), teacher.float()
    mask = torch.ones(student.shape[:2], device=student.device) if attention_mask is None else attention_mask
    real = mask.bool()
    variance = teacher[real].var(0).sum().clamp(min=torch.finfo(torch.float32).tiny)
    tokens = (student[real] - teacher[real]).square().sum(-1).mean() / variance
    pooled = (mean_pooled(student, mask) - mean_pooled(teacher, mask)).square().sum(-1).mean() / variance
    return tokens + embedding_weight * pooled


class Distillation:
    """Adds a distillation term to a language model's loss: `(1 - weight) * loss + weight * soft_target_loss`.

    Called inside `Trainer.compute_loss`, or as one of the `loss_hooks` of `training.trainer.SchemeTrainer`.

    Args:
        teacher: from `frozen_teacher`.
        causal: whether a position predicts the next token instead of its own.
        temperature: temperature of `soft_target_loss`.
        weight: between 0 and 1; with 1 the labels are not used.

    Raises:
        ValueError: for a temperature or a weight out of range, or a teacher with trainable parameters.
    """

    def __init__(self, teacher: nn.Module, *, causal: bool, temperature: float = 2.0, weight: float = 0.5) -> None:
        if any(parameter.requires_grad for parameter in teacher.parameters()):
            raise ValueError(
                "The teacher has trainable parameters. Make it with frozen_teacher(model), before the swap."
            )
        self.teacher = teacher
        self.causal = causal
        self.temperature = temperature
        self.weight = weight
        check_number(self, "temperature", above=0)
        check_number(self, "weight", above=0, maximum=1)

    def __call__(self, inputs: Mapping[str, Any], outputs: Any, loss: Tensor, num_items: Tensor | int) -> Tensor:
        """Returns the training loss.

        Args:
            inputs: inputs of the model, including "labels"; the teacher gets the same inputs without labels.
            outputs: outputs of the student, with `logits`.
            loss: the student's own loss.
            num_items: number of targets in the whole update, by which the sum over tokens is divided.
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
