"""Biases of distance over the steps of a decoding loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_posenc.schemes.bias.t5 import T5Bias
from tests.matrix.running import patched, tokens


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many distances each evaluation of the bias was for."""
    seen: list[int] = []
    forward = T5Bias.forward

    def watched(self: T5Bias, distance: torch.Tensor) -> torch.Tensor:
        seen.append(distance.numel())
        return forward(self, distance)

    monkeypatch.setattr(T5Bias, "forward", watched)
    return seen


def steps(model: Any, cache: Any, start: int, stop: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [model(tokens()[:, slot : slot + 1], past_key_values=cache).logits for slot in range(start, stop)], dim=1
        )


def prefilled(model: Any, length: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens()[:, :length], past_key_values=cache)
    return cache


def test_a_bias_is_evaluated_when_the_length_has_doubled(evaluations: list[int]) -> None:
    model = patched("llama_gqa", "t5", attn_implementation="sdpa")
    wanted = model(tokens()).logits.detach()
    cache = prefilled(model, 3)
    evaluations.clear()
    found = steps(model, cache, 3, 14)
    assert evaluations == [8, 18]
    torch.testing.assert_close(found, wanted[:, 3:], atol=1e-4, rtol=1e-4)


def test_a_weight_written_to_in_between_is_noticed(evaluations: list[int]) -> None:
    model = patched("llama_gqa", "t5", attn_implementation="sdpa")
    cache = prefilled(model, 6)
    steps(model, cache, 6, 7)
    evaluations.clear()
    steps(model, cache, 7, 8)
    assert not evaluations
    with torch.no_grad():
        model.position_encoding.get_parameter("stacks.model.groups.0.0.weight").mul_(-1)
    steps(model, cache, 8, 9)
    assert evaluations


def test_a_copy_of_a_cache_goes_on_as_the_cache_does() -> None:
    model = patched("llama_gqa", "t5", attn_implementation="sdpa")
    cache = prefilled(model, 6)
    steps(model, cache, 6, 8)
    twin = copy.deepcopy(cache)
    assert torch.equal(steps(model, cache, 8, 10), steps(model, twin, 8, 10))


def test_what_was_remembered_without_gradients_is_not_used_with_them() -> None:
    model = patched("llama_gqa", "t5", attn_implementation="sdpa")
    table = model.position_encoding.get_parameter("stacks.model.groups.0.0.weight")
    cache = prefilled(model, 6)
    steps(model, cache, 6, 7)
    model(tokens()[:, 7:8], past_key_values=cache).logits.square().sum().backward()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0
