"""Self-distillation with perturbed positions: predictions that depend less on where tokens stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.errors import SequenceLengthError, UnknownNameError
from hf_posenc.recipes.distillation import IGNORED
from hf_posenc.recipes.position_views import PositionViews, document_starts

#: How the positions of a view are perturbed: those of a suffix are increased, or all are rotated.
SHIFTS = ("skip", "cyclic")


def perturbed_positions(
    positions: Tensor,
    *,
    shift: str = "skip",
    largest_skip: int | None = None,
    limit: int | None = None,
    real: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws other positions for the same tokens (arXiv:2604.14339, section 2).

    A document is a run of consecutive positions. Each is perturbed by itself, so the documents of a packed row stay
    apart. With `L` tokens in a document:

    - "skip": token `i` keeps its position for `i < s`, and has its position plus `y` for `i >= s`. `s` is uniform in
      `0..L-1` and `y` in `1..Y`. As in the paper, `Y` is `L` unless `largest_skip` is given.
    - "cyclic": token `i` has the position of token `(i + u) mod L`. The range of `u` is a choice made here: uniform in
      `1..L-1`. A document of one token keeps its position.

    Both keep the order of the tokens within each of the two segments.

    Args:
        positions: `(batch, length)` int64, the standard positions.
        shift: "skip" (the paper's main variant) or "cyclic".
        largest_skip: `Y` in positions, for "skip".
        limit: the number of positions of the model. All positions returned are below it, if all given are.
        real: `(batch, length)` bool, false for padding, which keeps its positions. All by default.
        generator: for the draws, on the CPU. By default the global one, whose state a checkpoint of `Trainer` contains.

    Returns:
        `(batch, length)` int64.

    Raises:
        ValueError: for positions of another shape, or a `largest_skip` below 1.
        SequenceLengthError: for documents that leave no room for a skip below `limit`.
        UnknownNameError: for an unknown shift.
    """
    _check_options("", shift, largest_skip)
    if positions.dim() != 2 or positions.is_floating_point():
        raise ValueError(
            f"positions are {positions.dtype} of shape {tuple(positions.shape)}; expected integers, (batch, length)."
        )
    batch, length = positions.shape
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    slots = torch.arange(length, device=positions.device).expand_as(positions)
    starts = document_starts(positions, real)
    first = slots.where(starts, 0).cummax(-1).values
    # The slot after the last token of a document: the nearest start behind it.
    starts_behind = functional.pad(slots.where(starts, length)[:, 1:], (0, 1), value=length)
    size = starts_behind.flip(-1).cummin(-1).values.flip(-1) - first
    inner = slots - first
    # In float64 the product with a size is never rounded up to the size.
    drawn = torch.rand(2, batch, length, generator=generator, dtype=torch.float64).to(positions.device)
    boundary, amount = drawn.gather(-1, first.expand(2, -1, -1))
    if shift == "cyclic":
        turn = torch.where(size > 1, 1 + (amount * (size - 1)).long(), 0)
        moved = positions - inner + (inner + turn) % size
    else:
        largest = size if largest_skip is None else torch.full_like(size, largest_skip)
        if limit is not None:
            room = limit - positions - (size - inner)
            _refuse_full(positions, room, real, limit)
            largest = largest.minimum(room)
        skip = 1 + (amount * largest).long()
        moved = positions + skip * (inner >= (boundary * size).long())
    return moved.where(real, positions)


def _check_options(owner: str, shift: str, largest_skip: int | None) -> None:
    if shift not in SHIFTS:
        raise UnknownNameError("shift", shift, SHIFTS)
    if largest_skip is not None and largest_skip < 1:
        raise ValueError(f"{owner}largest_skip is {largest_skip!r}; expected 1 or more.")


def _refuse_full(positions: Tensor, room: Tensor, real: Tensor, limit: int) -> None:
    if bool(((room < 1) & real).any()):
        longest = int(positions.where(real, -1).max()) + 1
        raise SequenceLengthError(
            f"The positions reach {longest} and the model has {limit}, so no token can be moved further away. Train on "
            f"rows of fewer than {limit} tokens, give the model more positions, or use shift='cyclic', which stays "
            "within the positions of a row."
        )


def reverse_divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Computes `KL(student || teacher)` of each token, which is the reverse KL (arXiv:2604.14339, section 2).

    Args:
        student_logits: `(tokens, vocabulary)`.
        teacher_logits: the same shape.

    Returns:
        `(tokens,)` float32, in nats.
    """
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

    The first call checks that positions change the predictions of this model at all, that its attention does not, and
    that a token still sees those before a jump of the positions.

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
        UnsupportedError: for a model that takes no `position_ids`; for "cyclic" with a scheme that takes a wrap of the
            positions for the start of another document.
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
        if not 0 < weight < math.inf:
            raise ValueError(f"PerturbedSelfDistillation.weight is {weight!r}; expected a number greater than 0.")
        _check_options("PerturbedSelfDistillation.", shift, largest_skip)
        self.views = PositionViews(model)
        if shift == "cyclic":
            self.views.refuse_wrapping()
        self.weight = weight
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
        # Each row counts by its targets, whichever of them the row's mean is over.
        share = targets.sum(-1) / chosen.sum(-1).clamp(min=1)
        changed = (reverse_divergence(perturbed, standard) * share[chosen.nonzero()[:, 0]]).sum()
        return loss + self.weight * changed / num_items
