"""ALiBi and T5 against the implementations in transformers, and what is special about each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.schemes import AlibiConfig, BuildContext, DistanceBias, SchemeConfig, T5Config
from hf_posenc.schemes.bias.t5 import relative_position_bucket


def bias_of(config: SchemeConfig, heads: int = 4, causal: bool = True) -> DistanceBias:
    torch.manual_seed(0)
    part = config.build(BuildContext(8 * heads, heads, 8, causal=causal)).logit_bias
    assert part is not None
    return part


@pytest.mark.parametrize("heads", range(1, 21))
def test_alibi_equals_bloom_and_mpt(heads):
    length = 40
    # Both build the row of the last query, up to a constant per row.
    bias = bias_of(AlibiConfig(), heads)(torch.arange(length) - (length - 1))
    mpt = build_mpt_alibi_tensor(heads, length).view(heads, length)
    torch.testing.assert_close(bias, mpt, rtol=1e-6, atol=1e-6)
    bloom = build_alibi_tensor(torch.ones(1, length), heads, torch.float32).view(heads, length)
    torch.testing.assert_close(bias, bloom - bloom[:, -1:], rtol=1e-5, atol=1e-5)


def test_alibi_variants_follow_the_direction_of_the_model():
    distance = torch.arange(-9, 10)
    symmetric = bias_of(AlibiConfig(), causal=False)(distance)
    assert torch.equal(symmetric, symmetric.flip(-1))
    assert torch.equal(symmetric, bias_of(AlibiConfig("symmetric"), causal=False)(distance))
    causal = bias_of(AlibiConfig("causal"))(distance)
    assert torch.equal(causal[:, :10], symmetric[:, :10])


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


def test_learned_slopes_start_as_alibi_and_stay_positive():
    fixed, learned = bias_of(AlibiConfig()), bias_of(AlibiConfig(learnable=True))
    distance = torch.arange(-20, 1)
    assert not list(fixed.parameters())
    torch.testing.assert_close(fixed(distance), learned(distance), rtol=1e-6, atol=1e-6)
    optimizer = torch.optim.SGD(learned.parameters(), lr=1.0)
    learned(distance).sum().neg().backward()
    optimizer.step()
    assert (learned.slopes > 0).all()
    assert not torch.equal(learned.slopes, fixed.slopes)


@given(buckets=st.integers(2, 40).map(lambda n: 2 * n), factor=st.integers(2, 40), bidirectional=st.booleans())
@settings(max_examples=60, deadline=None)
def test_t5_buckets_equal_transformers(buckets, factor, bidirectional):
    distance = torch.arange(-3000, 3001)
    ours = relative_position_bucket(distance, buckets, buckets * factor, bidirectional)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, buckets * factor)
    assert torch.equal(ours, theirs)


def test_t5_buckets_equal_mpnet():
    distance = torch.arange(-500, 501)
    theirs = MPNetEncoder.relative_position_bucket(distance, num_buckets=32, max_distance=128)
    assert torch.equal(relative_position_bucket(distance, 32, 128, True), theirs)


def test_t5_direction_follows_the_model_and_per_layer_the_config():
    assert bias_of(T5Config(), causal=False).bidirectional
    assert not bias_of(T5Config(), causal=True).bidirectional
    assert bias_of(T5Config(bidirectional=True), causal=True).bidirectional
    assert not T5Config().per_layer
    assert T5Config(shared=False).per_layer


def test_t5_adopts_a_table_of_its_shape_only():
    part = bias_of(T5Config())
    native = torch.randn(32, 4)
    assert part.adopt(native)
    assert torch.equal(part.weight, native)
    assert not part.adopt(torch.randn(32, 5))
    assert torch.equal(part.weight, native)
