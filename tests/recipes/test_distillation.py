"""Learning from the model before a change, and LoRA next to a scheme."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_posenc import patch_model
from hf_posenc.recipes import (
    Distillation,
    add_lora,
    begin_blend,
    frozen_teacher,
    hidden_state_loss,
    mean_pooled,
    soft_target_loss,
)
from tests.matrix.running import patched, tokens


@pytest.mark.parametrize("causal", [True, False])
def test_only_targets_are_learned_and_the_mean_is_over_the_update(causal):
    model = patched("llama_gqa", None)
    teacher = frozen_teacher(model)
    patch_model(model, "alibi")
    ids = tokens()
    labels = ids.clone()
    labels[:, :6] = -100
    inputs = {"input_ids": ids, "labels": labels}
    outputs = model(ids)
    distill = Distillation(teacher, causal=causal, temperature=1.5, weight=1.0)
    loss = distill(inputs, outputs, torch.tensor(7.0), 10)
    shift = 1 if causal else 0
    places = [(row, place) for row in range(2) for place in range(14) if 6 <= place + shift < 14]
    by_hand = 0.0
    with torch.no_grad():
        taught = teacher(ids).logits
        for row, place in places:
            p, q = (torch.softmax(logits[row, place] / 1.5, -1) for logits in (taught, outputs.logits))
            by_hand += 1.5**2 * float((p * (p.log() - q.log())).sum())
    assert float(loss.detach()) == pytest.approx(by_hand / 10, rel=1e-4)
    half = Distillation(teacher, causal=causal, temperature=1.5, weight=0.25)(inputs, outputs, torch.tensor(7.0), 10)
    assert float(half.detach()) == pytest.approx(0.75 * 7 + 0.25 * by_hand / 10, rel=1e-4)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_teacher_stays_what_the_model_was():
    ids = tokens()
    model = patched("llama_gqa", "rope").train()
    with torch.no_grad():
        before = copy.deepcopy(model).eval()(ids).logits
        teacher = frozen_teacher(model)
        patch_model(model, "none")
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert torch.equal(teacher(ids).logits, before)
    assert model.training
    assert not teacher.training


def test_hidden_states_and_their_mean():
    teacher = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert float(hidden_state_loss(teacher, teacher, mask)) == 0
    student = teacher.clone()
    student[1, 2:] += 100  # Padding says nothing.
    assert float(hidden_state_loss(student, teacher, mask)) == 0
    real = teacher[mask.bool()]
    constant = real.mean(0).expand_as(teacher)
    # The variance has one degree of freedom less than there are tokens.
    assert float(hidden_state_loss(constant, teacher, mask, embedding_weight=0)) == pytest.approx(6 / 7, rel=1e-5)
    assert torch.allclose(mean_pooled(teacher, mask)[1], teacher[1, :2].mean(0))
    assert torch.allclose(mean_pooled(teacher), teacher.mean(1))


def test_a_mask_of_numbers_chooses_tokens():
    logits, mask = torch.rand(2, 3, 5), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert soft_target_loss(logits, -logits, mask) == soft_target_loss(logits, -logits, mask.bool())


# LoRA


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return add_lora(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def test_adapters_and_the_scheme_are_trained_and_nothing_else(tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = patched("llama_gqa", "t5")
    adapted = _lora(model)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        name for name, _ in adapted.named_parameters() if "position_encoding" in name
    }
    before = {name: parameter.detach().clone() for name, parameter in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for seed in range(2):  # The second adapter matrix starts at zero and hides the first one for a step.
        ids = tokens(seed=seed)
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, parameter in adapted.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trained
    ids = tokens()
    with torch.no_grad():
        expected = adapted.eval()(ids).logits
        adapted.merge_and_unload().save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        assert loaded.position_encoding.config.name == "t5"
        # Merging adds the product of the adapters to the weights, in float32.
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-4)


def test_of_a_blend_only_the_new_scheme_is_trained():
    model = patched("llama_gqa", "learned")
    begin_blend(model, "t5")
    adapted = _lora(model)
    trained = [p.shape for n, p in adapted.named_parameters() if p.requires_grad and "lora_" not in n]
    assert trained == [(32, 4)]
