"""Arguments that every recipe refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hf_posenc.recipes import (
    Distillation,
    GradualSwapCallback,
    PerturbedSelfDistillation,
    SchemePhases,
    SchemePhasesCallback,
    add_lora,
    drope,
    frozen_teacher,
    hidden_state_loss,
    perturbed_positions,
    pose_positions,
    reverse_divergence,
    soft_target_loss,
)
from tests.matrix.running import patched

INFINITE, NAN = float("inf"), float("nan")


#: The other arguments of a recipe.
OTHERS: dict[Any, Callable[[], dict[str, Any]]] = {
    Distillation: lambda: {"teacher": frozen_teacher(patched("llama_gqa", None)), "causal": True},
    PerturbedSelfDistillation: lambda: {"model": patched("llama_gqa", None)},
    perturbed_positions: lambda: {"positions": torch.arange(8)[None]},
    add_lora: lambda: {"model": patched("llama_gqa", None), "config": None},
    pose_positions: lambda: {"positions": torch.arange(8)[None], "target_length": 16},
}
OUTPUTS, NARROW = torch.rand(2, 3, 5), torch.rand(2, 3, 1)
WRONG: list[tuple[partial[Any], str]] = [
    (partial(Distillation, temperature=0), "Distillation.temperature is 0"),
    (partial(Distillation, temperature=INFINITE), "temperature is inf"),
    (partial(Distillation, temperature="2"), "temperature is '2'"),
    (partial(Distillation, weight=0), "weight is 0"),
    (partial(Distillation, weight=1.1), "weight is 1.1"),
    (partial(Distillation, teacher=torch.nn.Linear(2, 2)), "frozen_teacher"),
    (partial(soft_target_loss, OUTPUTS, NARROW, torch.ones(2, 3)), r"\(2, 3, 5\) and those of the teacher \(2, 3, 1\)"),
    (partial(hidden_state_loss, OUTPUTS, NARROW), "of the teacher"),
    (partial(reverse_divergence, OUTPUTS, NARROW), "of the teacher"),
    (partial(PerturbedSelfDistillation, weight=0), "weight is 0"),
    (partial(PerturbedSelfDistillation, weight=NAN), "weight is nan"),
    (partial(PerturbedSelfDistillation, weight="1"), "weight is '1'"),
    (partial(PerturbedSelfDistillation, shift="skips"), "Did you mean 'skip'"),
    (partial(perturbed_positions, shift="cycle"), "Did you mean 'cyclic'"),
    (partial(perturbed_positions, shift=None), "Unknown shift 'None'"),
    (partial(perturbed_positions, largest_skip=0), "largest_skip is 0"),
    (partial(perturbed_positions, limit=8), "reach 8 and the model has 8"),
    (partial(perturbed_positions, positions=torch.arange(8)), "expected integers"),
    (partial(pose_positions, chunks=1), "chunks is 1; expected 2 or more"),
    (partial(pose_positions, target_length=7), "target_length is 7, and a document has 8 tokens"),
    (partial(pose_positions, target_length=NAN), "target_length is nan"),
    (partial(pose_positions, positions=torch.rand(1, 8)), "expected integers"),
    (partial(pose_positions, real=torch.ones(1, 7)), r"real has the shape \(1, 7\), and positions have \(1, 8\)"),
    (partial(SchemePhases, ()), "step 0"),
    (partial(SchemePhases, ((1, "rope"),)), "step 0"),
    (partial(SchemePhases, ((0, "rope"), (5, "none"), (5, "alibi"))), "in order"),
    (partial(SchemePhases, ((0, "ropee"),)), "rope"),
    *(
        (partial(SchemePhases, (phase,)), "is not a phase")
        for phase in (0, (0.5, "none"), ("0", "none"), (0, "none", 5))
    ),
    # A part without a step.
    *((partial(drope, *of), "at least 1") for of in ((10, 0.0), (10, 1.0), (1, 0.5), (10, NAN), (10, -0.5))),
    (partial(SchemePhasesCallback, "drope"), "drope"),
    (partial(add_lora), "has no scheme to train. Call swap_scheme or patch_model"),
    *((partial(GradualSwapCallback, steps), "steps is .*at least 1") for steps in (0, True, 2.0)),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments_are_refused(call: partial[Any], message: str) -> None:
    others = OTHERS.get(call.func, dict)()
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        call(**(others | call.keywords))
