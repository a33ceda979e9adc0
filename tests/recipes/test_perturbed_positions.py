"""Other positions for the same tokens, and learning to predict the same from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_posenc import SequenceLengthError, UnsupportedError, patch_model
from hf_posenc.recipes import PerturbedSelfDistillation, perturbed_positions, pose_positions
from tests.documentation.pages import page_text
from tests.matrix.running import patched, tokens
from tests.thinning import in_turn


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(documents: list[list[int]], first: int = 0) -> tuple[Tensor, Tensor, list[list[tuple[int, int]]]]:
    """Positions of rows of documents with these lengths, what is real, and where each document is."""
    length = max(sum(row) for row in documents)
    positions, real, places = [], [], []
    for row in documents:
        filled = [torch.arange(first, first + size) for size in row]
        padding = length - sum(row)
        positions.append(torch.cat([*filled, torch.zeros(padding, dtype=torch.int64)]))
        real.append(torch.arange(length) < length - padding)
        ends = torch.tensor(row).cumsum(0).tolist()
        places.append([(end - size, end) for size, end in zip(row, ends, strict=True)])
    return torch.stack(positions), torch.stack(real), places


DOCUMENTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 999), largest=st.none() | st.integers(1, 20), room=st.integers(1, 30))
def test_a_skip_moves_the_rest_of_each_document(documents, seed, largest, room):
    positions, real, places = _rows(documents, first=seed % 7)
    limit = int(positions.max()) + 1 + room
    moved = perturbed_positions(positions, largest_skip=largest, limit=limit, real=real, generator=_generator(seed))
    assert torch.equal(moved[~real], positions[~real])
    assert int(moved[real].max()) < limit
    for row, of_row in enumerate(places):
        for start, end in of_row:
            skips = (moved - positions)[row, start:end]
            # One boundary: nothing before it, one amount behind it.
            assert skips.sort().values.equal(skips)
            amounts = set(skips.tolist()) - {0}
            assert len(amounts) == 1
            assert 1 <= amounts.pop() <= (end - start if largest is None else largest)


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 999))
def test_a_cyclic_shift_rotates_each_document(documents, seed):
    positions, real, places = _rows(documents, first=seed % 7)
    moved = perturbed_positions(positions, shift="cyclic", real=real, generator=_generator(seed))
    assert torch.equal(moved[~real], positions[~real])
    for row, of_row in enumerate(places):
        for start, end in of_row:
            before, after = positions[row, start:end], moved[row, start:end]
            assert after.sort().values.equal(before)
            assert (after == before).all() == (end - start == 1)
            assert int((after.diff() != 1).sum()) == (end - start > 1)


def test_boundary_and_skip_are_uniform():
    """arXiv:2604.14339, section 2: s in 0..L-1 and y in 1..L."""
    moved = perturbed_positions(torch.arange(4).expand(4000, 4), generator=_generator(1)) - torch.arange(4)
    boundaries = (moved == 0).sum(-1).bincount(minlength=4)
    skips = moved[:, -1].bincount(minlength=5)
    assert boundaries.shape == (4,)
    assert skips.shape == (5,)
    assert int(skips[0]) == 0
    # Five standard deviations of a count out of 4000 with probability 1/4.
    assert (torch.cat([boundaries, skips[1:]]) - 1000).abs().max() < 137


@pytest.mark.parametrize("draw", [perturbed_positions, lambda positions: pose_positions(positions, 90)])
def test_the_global_generator_is_the_default(draw):
    positions = torch.arange(20).expand(3, 20)
    torch.manual_seed(5)
    first = draw(positions)
    torch.manual_seed(5)
    assert torch.equal(draw(positions), first)
    assert not torch.equal(draw(positions), first)


# The loss


def _call(model: Any, inputs: dict[str, Any], num_items: int = 26, **options: Any) -> Tensor:
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    hook = PerturbedSelfDistillation(model, generator=_generator(4), **options)
    return hook(inputs, outputs, torch.tensor(7.0), num_items)


def _by_hand(model: Any, inputs: dict[str, Any], moved: Tensor, standard: Tensor) -> float:
    """The mean divergence of each row's moved targets, times the row's targets, in a plain loop."""
    ids, labels, total = inputs["input_ids"], inputs["labels"], 0.0
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        usual = model(ids, attention_mask=mask).logits
        other = model(ids, attention_mask=mask, position_ids=moved).logits
    for row in range(ids.shape[0]):
        targets = [slot for slot in range(ids.shape[1] - 1) if labels[row, slot + 1] != -100]
        divergences = []
        for slot in targets:
            if moved[row, slot] != standard[row, slot]:
                student, teacher = other[row, slot].softmax(-1), usual[row, slot].softmax(-1)
                divergences.append(float((student * (student.log() - teacher.log())).sum()))
        total += len(targets) * sum(divergences) / max(1, len(divergences))
    return total


@pytest.mark.parametrize(("name", "scheme"), [("llama_gqa", None), ("llama_gqa", "alibi"), ("gpt2", None)])
@pytest.mark.parametrize("shift", ["skip", "cyclic"])
def test_the_loss_by_hand(name, scheme, shift):
    model = patched(name, scheme)
    ids = tokens()
    labels = ids.clone()
    labels[0, :5] = -100
    # The second row is padded.
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    labels[1, 11:] = -100
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    standard = torch.arange(ids.shape[1]).expand_as(ids)
    limit = 64 if name == "gpt2" else None
    moved = perturbed_positions(standard, shift=shift, limit=limit, real=mask.bool(), generator=_generator(4))
    expected = _by_hand(model, inputs, moved, standard) / 19
    assert expected > 1e-4
    assert float(_call(model, inputs, 19, shift=shift, weight=0.5).detach()) == pytest.approx(7 + 0.5 * expected, 1e-4)


def test_no_gradient_flows_through_the_standard_view():
    model = patched("llama_gqa", "rope")
    ids = tokens()
    inputs = {"input_ids": ids, "labels": ids}
    outputs = model(ids)
    outputs.logits.retain_grad()
    hook = PerturbedSelfDistillation(model, generator=_generator(4))
    hook(inputs, outputs, torch.zeros(()), 26).backward()
    assert outputs.logits.grad is None
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(grad is not None for grad in gradients.values())
    # The gradient is that of the perturbed view alone, with the standard view as constants.
    model.zero_grad()
    moved = perturbed_positions(torch.arange(14).expand(2, 14), generator=_generator(4))
    student = model(ids, attention_mask=torch.ones_like(ids), position_ids=moved).logits[:, :-1].log_softmax(-1)
    teacher = outputs.logits.detach()[:, :-1].log_softmax(-1)
    behind = (moved != torch.arange(14))[:, :-1]
    each = (student.exp() * (student - teacher)).sum(-1) * behind
    (each.sum(-1) / behind.sum(-1).clamp(min=1) * 13 / 26).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6), name


# What the model is given


@pytest.mark.parametrize(
    ("scheme", "attention", "shift"),
    in_turn([None, "rope", "alibi", "t5", ["native", "kerple"]], ["eager", "sdpa"], ["skip", "cyclic"]),
    ids=str,
)
def test_tokens_behind_a_jump_see_those_before_it_and_no_later_ones(attention, scheme, shift):
    model, ids = patched("llama_gqa", scheme), tokens(batch=1)
    model.set_attn_implementation(attention)
    hook = PerturbedSelfDistillation(model, shift=shift)
    inputs = {"input_ids": ids, "labels": ids}
    view = hook.views.of(inputs, model(ids).logits)
    moved = torch.arange(14).unsqueeze(0) + 3 * (torch.arange(14) >= 7)
    moved = moved if shift == "skip" else torch.arange(14).roll(5).unsqueeze(0)
    with torch.no_grad():
        usual = hook.views.logits(view, moved)[0]
        for changed in (0, 6, 9):
            others = ids.clone()
            others[0, changed] = (ids[0, changed] + 1) % 90
            view.given["input_ids"] = others
            differs = (hook.views.logits(view, moved)[0] != usual).any(-1)
            assert not differs[:changed].any()
            assert differs[changed:].all()


@pytest.mark.parametrize(("name", "scheme"), [("llama_gqa", None), ("llama_gqa", "alibi"), ("gpt2", "t5")])
def test_documents_of_a_packed_row_stay_apart(name, scheme):
    model, ids = patched(name, scheme), tokens(batch=1)
    positions = torch.cat([torch.arange(5), torch.arange(9)]).unsqueeze(0)
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    outputs = model(ids, position_ids=positions, use_cache=False)
    hook = PerturbedSelfDistillation(model)
    view = hook.views.of(inputs, outputs.logits)
    moved = positions + 2 * (torch.arange(14) >= 10)
    with torch.no_grad():
        together = hook.views.logits(view, moved)
        mask = torch.ones(1, 9, dtype=torch.int64)
        alone = model(ids[:, 5:], position_ids=moved[:, 5:], attention_mask=mask).logits
    assert torch.allclose(together[:, 5:], alone, atol=1e-4)
    assert torch.allclose(together[:, :5], outputs.logits[:, :5], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "scheme", "message"),
    [
        ("llama_gqa", "none", "the scheme 'none' does not read them"),
        ("llama_gqa", "forget_gate", "has no effect"),
        ("llama_gqa", "repo", "has no effect"),
        ("gpt2", "cope", "has no effect"),
        ("bloom", None, "takes no position_ids"),
        ("bart", None, "is an encoder-decoder"),
        ("bert", None, "it is not causal"),
    ],
)
def test_models_in_which_nothing_could_be_learned_are_refused(name, scheme, message):
    model, ids = patched(name, scheme), tokens()
    with pytest.raises(UnsupportedError, match=message):
        _call(model, {"input_ids": ids, "labels": ids})


def _padded_left() -> dict[str, Any]:
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[1, :3] = 0
    return {"attention_mask": mask}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_padded_left(), 'tokenizer.padding_side = "right"'),
        ({"position_ids": torch.zeros(3, 2, 14, dtype=torch.int64)}, "along one axis"),
        ({"cu_seq_lens_q": torch.tensor([0, 14])}, "have cu_seq_lens_q"),
        ({"attention_mask": {"full_attention": None}}, "not a tensor"),
        ({"labels": tokens(length=9)}, "tokens of its own"),
    ],
)
def test_inputs_without_free_positions_are_refused(changes, message):
    model, ids = patched("llama_gqa", None), tokens()
    hook = PerturbedSelfDistillation(model)
    with pytest.raises(UnsupportedError, match=message):
        hook({"input_ids": ids, "labels": ids} | changes, model(ids), torch.zeros(()), 26)


def test_packed_rows_and_a_window_of_attention_are_refused():
    model, ids = patched("mistral_sliding", None), tokens()
    positions = torch.cat([torch.arange(2), torch.arange(12)]).expand(2, -1)
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    with pytest.raises(UnsupportedError, match="sliding-window attention"):
        _call(model, inputs)
    assert float(_call(model, {"input_ids": ids, "labels": ids}).detach()) > 7


def test_flash_attention_is_refused():
    model, ids = patched("llama_gqa", None), tokens()
    outputs = model(ids)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="sdpa"):
        PerturbedSelfDistillation(model)({"input_ids": ids, "labels": ids}, outputs, torch.zeros(()), 26)


def test_attention_that_splits_rows_at_jumps_is_found(monkeypatch):
    """A backend that looks at positions in spite of the mask, as FlashAttention does with one row."""
    model, ids = patched("llama_gqa", None), tokens(batch=1)
    outputs, forward = model(ids), type(model.model).forward

    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **(kwargs | {"attention_mask": None}))

    monkeypatch.setattr(type(model.model), "forward", split)
    with pytest.raises(UnsupportedError, match="start of another document"):
        PerturbedSelfDistillation(model)({"input_ids": ids, "labels": ids}, outputs, torch.zeros(()), 26)


SEGMENTS = {"scheme": "hierarchical", "segment": "rope", "separators": [5]}


@pytest.mark.parametrize("scheme", ["selective_rope", ["selective_rope", "alibi"], SEGMENTS])
def test_a_scheme_that_finds_documents_by_positions_takes_no_wraps(scheme):
    model = patched("llama_gqa", scheme)
    with pytest.raises(UnsupportedError, match="start of another document"):
        PerturbedSelfDistillation(model, shift="cyclic")
    PerturbedSelfDistillation(model, shift="skip")


def test_a_table_without_free_rows_is_refused():
    model = patched("gpt2", None)
    ids = tokens(length=64)
    inputs = {"input_ids": ids, "labels": ids}
    with pytest.raises(SequenceLengthError, match="reach 64 and the model has 64"):
        _call(model, inputs)
    assert float(_call(model, inputs, shift="cyclic").detach()) > 7
    patch_model(model, "learned", num_positions=80)
    assert PerturbedSelfDistillation(model).views.limit() == 80


def test_a_batch_without_pairs_of_tokens_adds_nothing_and_is_not_the_one_that_is_checked():
    model, ids = patched("llama_gqa", "none"), tokens(length=1)
    hook = PerturbedSelfDistillation(model)
    assert float(hook({"input_ids": ids, "labels": ids}, model(ids), torch.tensor(7.0), 1).detach()) == 7
    ids = tokens()
    with pytest.raises(UnsupportedError, match="has no effect"):
        hook({"input_ids": ids, "labels": ids}, model(ids), torch.zeros(()), 26)


def test_the_check_leaves_no_trace():
    model, ids = patched("llama_gqa", "randomized").train(), tokens()
    inputs = {"input_ids": ids, "labels": ids}
    hook = PerturbedSelfDistillation(model)
    outputs = model(ids)
    state = torch.random.get_rng_state()
    hook.views.of(inputs, outputs.logits)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert "labels" in inputs


# Training


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    ids, gradients = tokens(), []
    for checkpointing in (False, True):
        model = patched("llama_gqa", "rope").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        outputs = model(ids, use_cache=False)
        hook = PerturbedSelfDistillation(model, generator=_generator(4))
        loss = outputs.logits.float().logsumexp(-1).mean()
        hook({"input_ids": ids, "labels": ids}, outputs, loss, 26).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-4, atol=1e-6), name


def test_bfloat16_is_near_float32():
    ids = tokens()
    inputs = {"input_ids": ids, "labels": ids}
    plain = float(_call(patched("llama_gqa", "rope"), inputs)) - 7
    with torch.autocast("cpu", torch.bfloat16):
        cast = float(_call(patched("llama_gqa", "rope"), inputs)) - 7
    whole = float(_call(patched("llama_gqa", "rope").to(torch.bfloat16), inputs)) - 7
    assert plain > 0.1
    assert cast == pytest.approx(plain, rel=0.2)
    assert whole == pytest.approx(plain, rel=0.2)


def test_adapters_learn_it_too():
    peft = pytest.importorskip("peft")
    model, ids = patched("llama_gqa", None), tokens()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    hook = PerturbedSelfDistillation(adapted)
    hook({"input_ids": ids, "labels": ids}, adapted(input_ids=ids), torch.zeros(()), 26).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for n, p in adapted.named_parameters() if "lora_" in n)


def test_a_trainer_of_transformers(tmp_path, monkeypatch):
    """The class of docs/how_to/healing.md, with accumulated batches, checkpointing and bfloat16."""
    from transformers import TrainingArguments

    page = page_text("healing")
    (block,) = [
        text.split("```")[0] for text in page.split("```python\n") if "PerturbedSelfDistillation(model)" in text
    ]
    model = patched("llama_gqa", "rope")
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to="none", save_strategy="no", bf16=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    model.gradient_checkpointing_enable()
    before = [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]
    calls = []
    called = PerturbedSelfDistillation.__call__

    def counted(self: Any, inputs: Any, outputs: Any, loss: Tensor, num_items: Any) -> Tensor:
        total = called(self, inputs, outputs, loss, num_items)
        calls.append((int(num_items), float((total - loss).detach())))
        return total

    monkeypatch.setattr(PerturbedSelfDistillation, "__call__", counted)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(batch=16)]
    exec(compile(block, "healing.md", "exec"), {"model": model, "arguments": arguments, "rows": rows})
    assert len(calls) == 6
    assert {items for items, _ in calls} == {4 * 13}
    assert all(added > 0 for _, added in calls)
    after = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(not torch.equal(start, other) for start, other in zip(before, after, strict=True))
