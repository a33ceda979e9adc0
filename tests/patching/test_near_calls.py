"""Schemes that change far pairs only: a call without any such pair computes no bias, and a later one still can."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_posenc import patch_model
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig
from hf_posenc.schemes.position_maps.pairwise import FarRotation
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig
from tests.models import tiny

WINDOW = 6
SCHEME = SelfExtendConfig(group=2, window=WINDOW)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tiny("LlamaForCausalLM").eval()


@pytest.fixture
def biases(monkeypatch):
    """The number of queries of every bias that is computed."""
    counted = []
    forward = FarRotation.forward

    def counting(self, pairs):
        counted.append(pairs.query.shape[-2])
        return forward(self, pairs)

    monkeypatch.setattr(FarRotation, "forward", counting)
    return counted


@torch.no_grad()
def test_only_far_pairs_cost_a_bias(model, biases):
    patch_model(model, SCHEME)
    ids = torch.arange(9).unsqueeze(0)
    expected = model(ids).logits
    assert sum(biases) == 2 * 9
    biases.clear()

    cache, found = DynamicCache(config=model.config), []
    for token in ids.unbind(1):
        found.append(model(token.unsqueeze(1), past_key_values=cache).logits)
    # The first query with a far key is that of position WINDOW.
    assert len(biases) == 2 * (9 - WINDOW)
    # Two kernels sum in different orders.
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_given_positions_decide(model, biases):
    patch_model(model, SCHEME)
    ids = torch.arange(4).unsqueeze(0)
    model(ids, position_ids=torch.tensor([[0, 1, 2, WINDOW - 1]]), use_cache=False)
    assert not biases
    model(ids, position_ids=torch.tensor([[0, 1, 2, WINDOW]]), use_cache=False)
    assert biases


@torch.no_grad()
def test_mapped_positions_are_not_taken_for_those_of_the_tokens(model, biases):
    patch_model(model, PositionScaleConfig(inner=SCHEME, factor=0.5))
    model(torch.arange(WINDOW - 1).unsqueeze(0))
    assert biases
