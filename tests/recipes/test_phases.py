"""Schemes that change while training, and what an optimizer decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_posenc
from hf_posenc import UnsupportedError
from hf_posenc.recipes import SchemePhases, SchemePhasesCallback, drope, parameter_groups
from tests.matrix.running import patched


class Copying(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that repeat their first half."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        half = torch.randint(5, 30, (8,), generator=torch.Generator().manual_seed(index % 16))
        ids = torch.cat((half, half))
        return {"input_ids": ids, "labels": ids}


def arguments_of(folder: Any, steps: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, lr_scheduler_type="constant", seed=0,
        **({"learning_rate": 1e-2, "save_strategy": "no"} | options),
    )  # fmt: skip


def trained(phases: SchemePhases, steps: int, folder: Any, before: str | None = None) -> tuple[Any, list[float]]:
    model = patched("llama_gqa", before)
    callbacks: Any = [SchemePhasesCallback(phases)]
    trainer = Trainer(model, arguments_of(folder, steps), train_dataset=Copying(), callbacks=callbacks)
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_drope_drops_positions_at_its_step_and_recovers(tmp_path):
    """The loss jumps when positions are dropped, and the last steps recover most of it (the paper's recalibration)."""
    steps = 100
    model, losses = trained(drope(steps, recalibration=0.4), steps, tmp_path)
    dropped = 60
    before, jump, after = sum(losses[dropped - 10 : dropped]) / 10, losses[dropped], sum(losses[-10:]) / 10
    assert model.position_encoding.config == hf_posenc.NoneConfig()
    assert jump > before + 0.1
    assert after < before + (jump - before) / 2


def test_phases_hold_from_their_first_step_on():
    phases = SchemePhases(((0, "native"), (3, "alibi"), (5, {"scheme": "rope", "theta": 100.0}), (9, "native")))
    rope = {"scheme": "rope", "theta": 100.0}
    assert [phases.at(step) for step in (0, 2, 3, 4, 8, 9, 100)] == [
        *["native"] * 2,
        *["alibi"] * 2,
        rope,
        *["native"] * 2,
    ]
    model = patched("llama_gqa", None)
    assert [phases.apply(model, step) for step in range(11)] == [step in (3, 5, 9) for step in range(11)]
    assert not hasattr(model, "position_encoding")


def test_a_later_phase_cannot_bring_parameters():
    model = patched("llama_gqa", None)
    phases = SchemePhases(((0, "t5"), (2, "learned")))
    phases.apply(model, 0)
    with pytest.raises(UnsupportedError, match="new training run"):
        phases.apply(model, 2)
    assert model.position_encoding.config == hf_posenc.T5Config()


def test_groups_hold_every_trained_parameter_once():
    model = patched("bert", "t5")
    groups = parameter_groups(model, 0.3)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    undecayed = {id(parameter) for parameter in groups[1]["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (id(parameter) in undecayed) == (name.endswith("bias") or "LayerNorm" in name)


def test_a_phase_that_no_step_reaches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Adapt the phases"):
        trained(drope(500), 20, tmp_path)


@pytest.mark.parametrize("first", ["t5", "forget_gate"])
def test_parameters_that_the_optimizer_has_never_seen_are_refused(first, tmp_path):
    """The Trainer makes its optimizer before any callback runs."""
    phases = SchemePhases(((0, first), (10, "none")))
    with pytest.raises(UnsupportedError, match="before you create the Trainer"):
        trained(phases, 20, tmp_path)
    model, _ = trained(phases, 20, tmp_path, before=first)
    assert model.position_encoding.config == hf_posenc.NoneConfig()
