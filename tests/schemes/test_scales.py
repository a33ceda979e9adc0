"""Temperatures against transformers, each other, and what holds at any position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import Llama4TextConfig
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.mistral4 import modeling_mistral4

from hf_posenc.schemes import AlibiConfig, ComposedConfig, Positions, SchemeConfig
from hf_posenc.schemes.scale.llama4_scale import Llama4ScaleConfig
from hf_posenc.schemes.scale.log_n_scale import LogNScaleConfig
from hf_posenc.schemes.scale.ssmax import SSMaxConfig

from .building import at, counted, logits_of, part_of

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 8
SCALES = [
    pytest.param(SSMaxConfig(), id="ssmax"),
    pytest.param(LogNScaleConfig(5), id="log_n"),
    pytest.param(LogNScaleConfig(5, clamp=False), id="log_n unclamped"),
    pytest.param(Llama4ScaleConfig(floor_scale=3), id="llama4"),
    pytest.param(Llama4ScaleConfig(0.4, 5, offset=0), id="ministral3"),
]


def scale_of(config: SchemeConfig, **changes: Any) -> Any:
    return part_of(config, num_heads=HEADS, **changes)


def test_the_defaults_are_those_of_llama4():
    stock, ours = Llama4TextConfig(), Llama4ScaleConfig()
    assert (ours.attention_scale, ours.floor_scale) == (stock.attn_scale, stock.floor_scale)
    factor = scale_of(ours)(at([0, 8190, 8191, 16382, 16383, 100_000]))[0, 0]
    expected = [1 + 0.1 * math.log(1 + steps) for steps in (0, 0, 1, 1, 2, 12)]
    torch.testing.assert_close(factor, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("modeling", [modeling_ministral3, modeling_mistral4])
@given(
    ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=8), beta=st.floats(0.01, 2), length=st.integers(1, 20000)
)
@settings(max_examples=40, deadline=None)
def test_the_formula_of_ministral3_and_mistral4(modeling, ids, beta, length):
    theirs = modeling.get_llama_4_attn_scale(torch.tensor([ids]), beta, length)
    ours = scale_of(Llama4ScaleConfig(beta, length, offset=0))(at(ids))
    # Theirs rounds 1 + steps before the logarithm and multiplies in float32, too: a few units in the last place.
    torch.testing.assert_close(ours[0, 0], theirs[0, 0, :, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", SCALES)
def test_an_encoder_scales_all_its_queries_by_the_real_length(config):
    part = scale_of(config, causal=False)
    padded = torch.tensor([[-1, -1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    factor = part(at(padded, [[4], [7]]))
    last = scale_of(config)(at(torch.tensor([[3], [6]])))
    torch.testing.assert_close(factor, last.expand_as(factor), rtol=0, atol=0)
    assert (factor[0] < factor[1]).all()
    assert torch.equal(part(Positions(padded.float(), torch.tensor([[4], [7]]))), factor)
    assert part.length_dependent
    assert not scale_of(config).length_dependent


@pytest.mark.parametrize("config", SCALES)
def test_the_bias_of_another_scheme_is_scaled_too(config):
    positions = counted(12)
    together = logits_of(ComposedConfig((AlibiConfig(), config)), positions)
    factor = part_of(config)(positions).unsqueeze(-1)
    torch.testing.assert_close(together, logits_of(AlibiConfig(), positions) * factor, rtol=0, atol=0)
    assert (factor[..., -1, :] != 1).all()
