"""Arguments that no recipe takes."""

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


def distilled(**options: Any) -> None:
    Distillation(frozen_teacher(patched("llama_gqa", None)), causal=True, **options)


def of_untrained_teacher() -> None:
    Distillation(patched("llama_gqa", None), causal=True)


def self_distilled(**options: Any) -> None:
    PerturbedSelfDistillation(patched("llama_gqa", None), **options)


def perturbed(**options: Any) -> None:
    perturbed_positions(**({"positions": torch.arange(8)[None]} | options))


def posed(**options: Any) -> None:
    pose_positions(**({"positions": torch.arange(8)[None], "target_length": 16} | options))


def phases(*given: Any) -> None:
    SchemePhases(given)


OUTPUTS, NARROW = torch.rand(2, 3, 5), torch.rand(2, 3, 1)
WRONG: list[tuple[Callable[..., Any], str]] = [
    (partial(distilled, temperature=0), "Distillation.temperature is 0"),
    (partial(distilled, temperature=INFINITE), "temperature is inf"),
    (partial(distilled, temperature="2"), "temperature is '2'"),
    (partial(distilled, weight=0), "weight is 0"),
    (partial(distilled, weight=1.1), "weight is 1.1"),
    (of_untrained_teacher, "frozen_teacher"),
    (partial(soft_target_loss, OUTPUTS, NARROW, torch.ones(2, 3)), r"\(2, 3, 5\) and those of the teacher \(2, 3, 1\)"),
    (partial(hidden_state_loss, OUTPUTS, NARROW), "of the teacher"),
    (partial(reverse_divergence, OUTPUTS, NARROW), "of the teacher"),
    (partial(self_distilled, weight=0), "weight is 0"),
    (partial(self_distilled, weight=NAN), "weight is nan"),
    (partial(self_distilled, weight="1"), "weight is '1'"),
    (partial(self_distilled, shift="skips"), "Did you mean 'skip'"),
    (partial(perturbed, shift="cycle"), "Did you mean 'cyclic'"),
    (partial(perturbed, shift=None), "Unknown shift 'None'"),
    (partial(perturbed, largest_skip=0), "largest_skip is 0"),
    (partial(perturbed, limit=8), "reach 8 and the model has 8"),
    (partial(perturbed, positions=torch.arange(8)), "expected integers"),
    (partial(posed, chunks=1), "chunks is 1; expected 2 or more"),
    (partial(posed, target_length=7), "target_length is 7, and a document has 8 tokens"),
    (partial(posed, target_length=NAN), "target_length is nan"),
    (partial(posed, positions=torch.rand(1, 8)), "expected integers"),
    (partial(posed, real=torch.ones(1, 7)), r"real has the shape \(1, 7\), and positions have \(1, 8\)"),
    (phases, "step 0"),
    (partial(phases, (1, "rope")), "step 0"),
    (partial(phases, (0, "rope"), (5, "none"), (5, "alibi")), "in order"),
    (partial(phases, (0, "ropee")), "rope"),
    *((partial(phases, phase), "is no phase") for phase in (0, (0.5, "none"), ("0", "none"), (0, "none", 5))),
    # A part without a step.
    *((partial(drope, *of), "at least 1") for of in ((10, 0.0), (10, 1.0), (1, 0.5), (10, NAN), (10, -0.5))),
    (partial(SchemePhasesCallback, "drope"), "drope"),
    *((partial(GradualSwapCallback, steps), "steps is .*at least 1") for steps in (0, True, 2.0)),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        call()
