"""What backends rely on in biases on queries, keys and hidden states, and what those refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc.schemes import AttentionPairs, BuildContext, DistanceBias, PairwiseBias, Positions, SchemeConfig
from hf_posenc.schemes.bias.cope import CopeConfig
from hf_posenc.schemes.bias.disentangled import DisentangledConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig
from hf_posenc.schemes.bias.grape import GrapeConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig
from hf_posenc.schemes.bias.shaw import ShawConfig
from hf_posenc.schemes.bias.transformer_xl import TransformerXLConfig
from hf_posenc.schemes.bias.wavelet import WaveletConfig
from hf_posenc.schemes.logits import pairwise_bias

HIDDEN, HEADS, HEAD_DIM, LENGTH = 32, 4, 8, 14
CONTEXT = BuildContext(HIDDEN, HEADS, HEAD_DIM, num_key_value_heads=2)


def bias_of(config: SchemeConfig) -> Any:
    torch.manual_seed(0)
    # Only a bidirectional model has later keys to tell apart.
    causal = getattr(config, "max_distance_ahead", None) is None
    bias = config.build(dataclasses.replace(CONTEXT, causal=causal)).logit_bias
    assert bias is not None
    return bias


def tensors(length: int = LENGTH, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(batch, HEADS, length, HEAD_DIM, generator=generator),
        torch.randn(batch, 2, length, HEAD_DIM, generator=generator),
        torch.randn(batch, length, HIDDEN, generator=generator),
    )


def pairs_for(bias: Any, ids: Tensor, query: Tensor, key: Tensor, hidden: Tensor) -> AttentionPairs:
    features = bias.key_features(hidden) if isinstance(bias, PairwiseBias) and bias.num_features else None
    lengths = torch.full((ids.shape[0], 1), ids.shape[1])
    slots = torch.arange(ids.shape[1])
    return AttentionPairs(query, key, slots, Positions(ids, lengths), HEAD_DIM**-0.5, hidden, features)


def counted(length: int = LENGTH) -> Tensor:
    return torch.arange(length).unsqueeze(0)


HALVES = torch.arange(LENGTH).unsqueeze(0) * 0.5


@pytest.mark.parametrize(
    "config",
    [
        ShawConfig("sinusoidal"),
        ShawConfig("wavelet"),
        TransformerXLConfig(),
        GrapeConfig(),
        ForgetGateConfig("bias_only"),
    ],
    ids=repr,
)
def test_real_positions_interpolate(config):
    bias = bias_of(config)
    query, key, hidden = tensors()
    whole = pairwise_bias(bias, pairs_for(bias, counted(), query, key, hidden))
    real = pairwise_bias(bias, pairs_for(bias, counted().float(), query, key, hidden))
    torch.testing.assert_close(whole, real, rtol=1e-5, atol=1e-5)
    halves = pairwise_bias(bias, pairs_for(bias, HALVES, query, key, hidden))
    # Every other token again has a whole distance, between the same heads at half of it.
    even = pairs_for(bias, counted(7), query[:, :, ::2], key[:, :, ::2], hidden[:, ::2])
    torch.testing.assert_close(halves[:, :, ::2, ::2], pairwise_bias(bias, even), rtol=1e-5, atol=1e-5)
    assert (halves[:, :, 1, 0] - halves[:, :, 1, 1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "config",
    [ShawConfig(), TransformerXLConfig(clamp_length=4), LowRankRelativeConfig(), DisentangledConfig(max_distance=4)],
    ids=repr,
)
def test_tables_refuse_real_positions(config):
    bias = bias_of(config)
    with pytest.raises(ValueError, match="floating-point"):
        bias(pairs_for(bias, HALVES, *tensors()))


@pytest.mark.parametrize("config", [ForgetGateConfig(gate="bias_only"), CopeConfig(), ForgetGateConfig()], ids=repr)
def test_a_bias_says_whether_it_is_a_function_of_distance_alone(config):
    bias = bias_of(config)
    assert isinstance(bias, DistanceBias) == (config == ForgetGateConfig(gate="bias_only"))


def test_wavelets_at_any_distance_equal_their_formula():
    """The table ends where the wavelets do: beyond it, and on its edge, they are nil in float32."""
    bias = WaveletConfig().build(BuildContext(128, 1, 128)).logit_bias
    distances = torch.tensor([0, 1, 3, 15, 100, 700, 890, 897, 911, 912, 913, 2000, 10**6])
    ids = torch.cat((distances.flip(0).neg(), distances)).unsqueeze(0)
    query = torch.eye(128)[None, None]
    keys = Positions(ids, torch.tensor([[ids.shape[1]]]))
    # Every query is one dimension, at the position 0 of slot 13.
    pairs = AttentionPairs(query, query[:, :, : ids.shape[1]], torch.full((128,), 13), keys, 1.0)
    u = torch.stack([(-ids[0].double() - shift) / 2.0**scale for scale in range(8) for shift in range(16)])
    expected = ((1 - u.square()) * (-0.5 * u.square()).exp()).float()
    torch.testing.assert_close(bias(pairs)[0, 0], expected, rtol=0, atol=1e-6)


def test_cope_starts_without_effect_and_learns_from_there():
    bias = bias_of(CopeConfig())
    values = bias(pairs_for(bias, counted(), *tensors()))
    assert not values.any()
    values.sum().backward()
    assert bias.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("config", "missing", "message"),
    [
        (ForgetGateConfig(), "key_features", "bias_only"),
        (LowRankRelativeConfig(), "hidden_states", "shaw"),
    ],
)
def test_what_a_layer_does_not_give_is_missed_with_a_remedy(config, missing, message):
    bias = bias_of(config)
    pairs = dataclasses.replace(pairs_for(bias, counted(), *tensors()), **{missing: None})
    with pytest.raises(ValueError, match=message):
        bias(pairs)


def test_biases_say_whether_they_need_whole_positions():
    for config in (ShawConfig(), LowRankRelativeConfig()):
        assert bias_of(config).whole_positions
    for config in (ShawConfig("sinusoidal"), ShawConfig("wavelet"), GrapeConfig(), TransformerXLConfig()):
        assert not bias_of(config).whole_positions
