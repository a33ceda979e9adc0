"""Biases that leave out what is the same for all, against the plain way, where there is something to leave out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc.schemes import (
    AttentionPairs,
    BuildContext,
    CopeConfig,
    DisentangledConfig,
    FireConfig,
    LowRankRelativeConfig,
    Positions,
    SchemeConfig,
    ShawConfig,
    WaveletConfig,
)
from hf_posenc.schemes.bias import cope, relative_tables
from hf_posenc.schemes.bias.fire import FireBias

LENGTH, HEADS, WIDTH = 96, 2, 8


def bias_of(config: Any) -> Any:
    torch.manual_seed(0)
    return config.build(BuildContext(16, HEADS, WIDTH, causal=True, max_positions=LENGTH)).logit_bias


def pairs(start: int, stop: int) -> AttentionPairs:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator) for _ in range(2))
    positions = Positions(torch.arange(LENGTH).unsqueeze(0), torch.tensor([[LENGTH]]))
    whole = AttentionPairs(query, key, torch.arange(LENGTH), positions, WIDTH**-0.5)
    return whole.of_queries(start, stop).of_first_keys(stop)


def values_and_gradients(bias: Any, given: AttentionPairs) -> list[Tensor]:
    found = bias(given)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    visible = given.slot_distance <= 0
    gradients = torch.autograd.grad((found * weights * visible).sum(), list(bias.parameters()))
    return [(found * visible).detach(), *gradients]


@pytest.mark.parametrize("config", [CopeConfig(num_positions=4), CopeConfig(num_positions=9), CopeConfig()])
def test_keys_beyond_the_table_of_cope(config: CopeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    bias, given = bias_of(config), pairs(80, 96)
    left_out = bias._keys_beyond_the_table(given)
    assert (left_out > 0) == (config.num_positions < 10)
    found = values_and_gradients(bias, given)
    monkeypatch.setattr(cope.CopeBias, "_keys_beyond_the_table", lambda self, pairs: 0)
    for one, other in zip(found, values_and_gradients(bias, given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_closed_gates_leave_cope_nothing_out() -> None:
    """Where no query counts any key, all keys are near."""
    bias, given = bias_of(CopeConfig(num_positions=4)), pairs(80, 96)
    closed = AttentionPairs(
        torch.full_like(given.query, 9.0),
        torch.full_like(given.key, -9.0),
        given.query_slots,
        given.keys,
        given.scaling,
    )
    assert bias._keys_beyond_the_table(closed) == 0


@pytest.mark.parametrize("start", [0, 40, 80])
def test_keys_that_all_find_in_one_row(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_tables, "_MANY_KEYS", 1)
    bias, given = bias_of(ShawConfig(max_distance=5)), pairs(start, start + 16)
    rows = given.distance.clamp(-5, 5) + 5
    assert relative_tables.leading_keys_of_one_row(rows) == max(0, start - 5 + 1)
    found = values_and_gradients(bias, given)
    monkeypatch.setattr(relative_tables, "leading_keys_of_one_row", lambda rows: 0)
    for one, other in zip(found, values_and_gradients(bias, given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "config", [ShawConfig(), DisentangledConfig(max_distance=24), WaveletConfig(), LowRankRelativeConfig(rank=3)]
)
def test_tables_have_only_distances_that_occur(config: SchemeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host knows the greatest position: a table for 12 tokens has at most 23 rows."""
    bias, given, rows = bias_of(config), pairs(0, 12), []
    with torch.no_grad():
        for parameter in bias.parameters():
            parameter.normal_()
    given = dataclasses.replace(given, hidden_states=torch.randn(2, 12, 16))
    known = dataclasses.replace(given, keys=Positions(given.keys.ids, given.keys.lengths).bounded(12))
    wanted = outputs_and_gradients(bias, given)
    own = Tensor.gather

    def gather(products: Tensor, *index: Any) -> Tensor:
        rows.append(products.shape[-1])
        return own(products, *index)

    monkeypatch.setattr(Tensor, "gather", gather)
    for one, other in zip(outputs_and_gradients(bias, known), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert 0 < max(rows) <= 23


def outputs_and_gradients(bias: Any, given: AttentionPairs) -> list[Tensor]:
    """Those of `values_and_gradients`, of parts without parameters too."""
    return values_and_gradients(bias, given) if [*bias.parameters()] else [bias(given)]


def plain_fire(bias: FireBias, given: AttentionPairs) -> Tensor:
    return bias.network(bias.normalized_distance(given)).movedim(-1, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_the_network_of_fire(seed: int) -> None:
    """Sums of up to 32 products in another order."""
    bias, given = bias_of(FireConfig(initial_threshold=20.0)), pairs(0, LENGTH)
    with torch.no_grad():
        torch.manual_seed(seed)
        for parameter in (bias.hidden_weight, bias.hidden_bias, bias.output_weight):
            parameter.normal_()
        # Units that are constant, and two with one corner.
        bias.hidden_weight[:2] = 0.0
        bias.hidden_weight[3], bias.hidden_bias[3] = -bias.hidden_weight[4], -bias.hidden_bias[4]
    plain = plain_fire(bias, given)
    torch.testing.assert_close(bias(given), plain, atol=1e-5, rtol=1e-5)
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad((bias(given) * weights).sum(), list(bias.parameters()))
    wanted = torch.autograd.grad((plain * weights).sum(), list(bias.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3 * float(other.abs().max()), rtol=1e-3)
