"""Biases by distance against transformers, their authors' code and each other, and what holds for any weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.schemes import AlibiConfig, FireConfig, KerpleConfig, SchemeConfig
from hf_posenc.schemes.bias.kerple import KerpleBias
from hf_posenc.schemes.bias.t5 import relative_position_bucket

from .building import at, counted, pairs_at, part_of


def bias_of(config: SchemeConfig, heads: int = 4, causal: bool = True) -> Any:
    return part_of(config, num_heads=heads, num_key_value_heads=heads, causal=causal)


@pytest.mark.parametrize("heads", [2, 3, 5, 12])
def test_asymmetric_heads_look_one_way_and_never_degenerate(heads):
    length = 7
    places = torch.arange(length)
    bias = bias_of(AlibiConfig("asymmetric"), heads, causal=False)(places[None, :] - places[:, None])
    weights = bias.softmax(dim=-1)
    left = (heads + 1) // 2
    assert torch.equal(weights[:left], weights[:left].tril())
    assert torch.equal(weights[left:], weights[left:].triu())
    assert (weights.diagonal(dim1=1, dim2=2) > 0).all()
    # A padding query on the far left: every real key is out of a left-looking head's sight.
    assert torch.isfinite(bias_of(AlibiConfig("asymmetric"), heads, causal=False)(places + 1).softmax(dim=-1)).all()


@given(buckets=st.integers(2, 40).map(lambda n: 2 * n), factor=st.integers(2, 40), bidirectional=st.booleans())
@settings(max_examples=60, deadline=None)
def test_t5_buckets_equal_transformers(buckets, factor, bidirectional):
    distance = torch.arange(-3000, 3001)
    ours = relative_position_bucket(distance, buckets, buckets * factor, bidirectional)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, buckets * factor)
    assert torch.equal(ours, theirs)


def kerple(config: KerpleConfig, r1: list[float], r2: list[float]) -> KerpleBias:
    part: KerpleBias = bias_of(config, len(r1))
    part.load_state_dict({"r1": torch.tensor(r1), "r2": torch.tensor(r2)})
    return part


# Rows at distances 0, 1, 3, 7 of `ParallelKerpleLog` and `ParallelKerplePower` (megatron/mpu/layers.py of the authors'
# repository chijames/KERPLE at commit 25be3d71), called on zero scores of 3 heads and 8 tokens, last query, with the
# parameters below; head 1 of the log form, head 2, and head 1 of the power form start outside of the allowed range.
LOG_FIXTURE = [
    [0.0, -0.5720027685165405, -1.3403775691986084, -2.2695019245147705],
    [0.0, -0.002985096536576748, -0.00886763259768486, -0.020297611132264137],
    [0.0, -0.006418538745492697, -0.013083327561616898, -0.01987874135375023],
]
POWER_FIXTURE = [
    [0.0, -0.800000011920929, -1.3856406211853027, -2.11660099029541],
    [0.0, -0.30000001192092896, -2.700000047683716, -14.700000762939453],
    [0.0, -0.009999999776482582, -0.04171167314052582, -0.1254952847957611],
]


@pytest.mark.parametrize(
    ("variant", "r1", "r2", "fixture"),
    [
        ("log", [1.7, 0.3, -0.2], [0.4, 0.001, 0.9], LOG_FIXTURE),
        ("power", [0.8, 0.3, -0.2], [0.5, 2.6, 1.3], POWER_FIXTURE),
    ],
)
def test_kerple_equals_the_authors_code(variant, r1, r2, fixture):
    part = kerple(KerpleConfig(variant), r1, r2)
    # Both are float32; the authors' log(1 + x) rounds 1 + x first, which costs 6e-8 absolute of 0.01.
    torch.testing.assert_close(part(torch.tensor([0, -1, -3, -7])), torch.tensor(fixture), rtol=1e-5, atol=1e-8)


def test_kerple_starts_where_the_authors_code_starts():
    """Uniform over (0, 2) and (0, 1), the other way round for the power: seen in the extremes of 5000 heads."""
    for variant, first, second in (("log", 2.0, 1.0), ("power", 1.0, 2.0)):
        part = bias_of(KerpleConfig(variant), heads=5000)
        for parameter, top in ((part.r1, first), (part.r2, second)):
            assert 0 <= parameter.min() < 0.01 * top
            assert 0.99 * top < parameter.max() <= top
            # Five standard errors of the mean of 5000 uniform numbers.
            assert abs(parameter.mean().item() - top / 2) < 5 * top / math.sqrt(12 * 5000)


def test_kerple_gradients_lead_back_into_the_range_only():
    """Descent on `sum(bias)` grows r1, descent on `-sum(bias)` shrinks it."""
    part = kerple(KerpleConfig("power"), [-0.5, 0.5], [2.5, 1.0])
    distance = torch.arange(5)
    for sign, stuck in ((1, "r2"), (-1, "r1")):
        part.zero_grad()
        (sign * part(distance).sum()).backward()
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()  # at distance 0 too, where 0 ** r2 has an infinite slope
            assert (parameter.grad[0] == 0) == (name == stuck)
            assert parameter.grad[1] != 0


# The bias that `FIRE` of chuanyang-Zheng/DAPE (megatron/model/positional_embeddings.py at commit bde344a8, the port of
# the paper's listing; there is no repository of the authors) adds to zero scores of 2 heads and 7 tokens, with
# mlp_width=3, init_L=8.0 (which it halves) and the weights below: query 6, then query 2, per head.
FIRE_QUERY_6 = [
    [1.5999981, 1.3798613, 1.1315497, 0.8467778, 0.4694474, -0.1355507, -0.9],
    [-0.4499990, -0.3399307, -0.2157748, -0.0733889, 0.05, 0.05, 0.05],
]
FIRE_QUERY_2 = [[0.6258821, -0.0410022, -0.9], [0.0370589, 0.05, 0.05]]


def test_fire_equals_the_ported_code():
    part = bias_of(FireConfig(width=3, initial_threshold=4.0), heads=2)
    weights = {
        "hidden_weight": [1.0, -2.0, 0.5],
        "hidden_bias": [0.0, 1.0, -0.25],
        "output_weight": [[1.0, -1.0, 2.0], [0.5, 0.25, -3.0]],
        "output_bias": [0.1, -0.2],
        "c": [-0.3],
        "threshold_factor": [-1.25],
    }
    part.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    bias = part(pairs_at(counted(7)))[0]
    # Seven decimals were kept of the fixture.
    torch.testing.assert_close(bias[:, 6], torch.tensor(FIRE_QUERY_6), rtol=0, atol=1e-6)
    torch.testing.assert_close(bias[:, 2, :3], torch.tensor(FIRE_QUERY_2), rtol=0, atol=1e-6)


def test_fire_in_an_encoder_is_symmetric_and_knows_the_real_length():
    part = bias_of(FireConfig(initial_threshold=4.0), causal=False)
    alone = part(pairs_at(counted(9)))
    torch.testing.assert_close(alone, alone.transpose(-1, -2), rtol=0, atol=0)
    # The pair of the first and the last token is the longest there is; epsilon is 1.7e-6 of its normaliser.
    quotient = part.normalized_distance(pairs_at(counted(9)))
    assert quotient.max() == quotient[0, 0, 8]
    assert quotient.max().item() == pytest.approx(1.0, abs=5e-6)
    both = part(pairs_at(at([[-1] * 5 + [*range(9)], [*range(14)]], [[9], [14]])))
    torch.testing.assert_close(both[:1, :, 5:, 5:], alone, rtol=0, atol=0)
    assert (both[1:, :, 5:, 5:] - alone).abs().max() > 1e-3
    assert part.length_dependent
    assert not bias_of(FireConfig()).length_dependent
    # Far below the threshold the two forms are one.
    causal, encoder = bias_of(FireConfig()), bias_of(FireConfig(), causal=False)
    assert torch.equal(causal(pairs_at(counted(9))), encoder(pairs_at(counted(9))))
