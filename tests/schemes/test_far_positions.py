"""Self-Extend and ReRoPE: equality with the official code, reductions, and which schemes can follow."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hf_posenc.schemes import (
    AlibiConfig,
    AttentionPairs,
    BuildContext,
    ComposedConfig,
    NoneConfig,
    PairwiseBias,
    Positions,
    PRopeConfig,
    RopeConfig,
    SchemeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig

from .position_map_cases import LENGTH, build, heads, logits_of, visible
from .table import positions_of


def attended(config: SchemeConfig) -> Tensor:
    """Causal attention over the vectors that the fixtures were made with, which are queries, keys and values alike."""
    hidden = torch.tensor(
        [[[[2 * math.sin(1 + 3 * token + 5 * component) for component in range(4)] for token in range(LENGTH)]]]
    )
    parts = config.build(BuildContext(4, 1, 4))
    logits = positional_logits(parts, hidden, hidden, positions_of(LENGTH))
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return (logits.masked_fill(future, -torch.inf).softmax(-1) @ hidden)[0, 0, [9, 13]]


# Each fixture is the attention output of queries 9 and 13: the function was run with identity projections on the
# vectors of `attended` (one head of four dimensions, RoPE of base 10000), a causal mask, and no query scale by log n.
OFFICIAL = [
    # `self_extend_forward` of github.com/datamllab/LongLM (legacy_patch_before_4_38/llama_self_extend_patch.py).
    (
        SelfExtendConfig(group=2, window=4),
        [[0.215253, 1.816913, 0.815526, -1.354245], [1.070312, 1.713524, -0.098188, -1.769228]],
    ),
    (
        SelfExtendConfig(group=3, window=5),
        [[0.099106, 1.816817, 0.931618, -1.288287], [0.992282, 1.730378, -0.010596, -1.736389]],
    ),
    # `forward_with_rerope` of github.com/bojone/rerope (rerope_patch.py), window = 4.
    (
        ReRopeConfig(window=4),
        [[0.260931, 1.794352, 0.757049, -1.36486], [1.050431, 1.740824, -0.062819, -1.776463]],
    ),
    # `forward_with_leaky_rerope` (leaky_rerope_patch.py), window = 4, scaling_factor = 3.
    (
        ReRopeConfig(window=4, factor=3.0),
        [[0.24539, 1.815464, 0.784567, -1.37036], [1.189607, 1.70747, -0.220917, -1.832802]],
    ),
]


@pytest.mark.parametrize(("config", "expected"), OFFICIAL, ids=lambda value: str(value)[:40])
def test_attention_equals_the_official_code(config, expected):
    torch.testing.assert_close(attended(config), torch.tensor(expected), rtol=0, atol=3e-6)


ROTATIONS = [
    RopeConfig(),
    RopeConfig(layout="interleaved", rotary_dim=4),
    RopeConfig(layout="half_reversed"),
    RopeConfig(scaling=YarnScaling(4.0, 16, beta_fast=4.0)),
    RopeConfig(attention_scaling=1.5),
    PRopeConfig(fraction=0.5),
    AlibiConfig(),
    T5Config(),
]


@pytest.mark.parametrize("inner", ROTATIONS, ids=str)
def test_reductions_to_the_scheme_itself(inner):
    expected = visible(logits_of(inner))
    for same in (
        SelfExtendConfig(inner, group=1, window=3),
        SelfExtendConfig(inner, group=4, window=LENGTH),
        ReRopeConfig(inner, window=LENGTH),
    ):
        assert torch.equal(visible(logits_of(same)), expected)
    for factor in (1, 1.0):
        assert torch.equal(visible(logits_of(ReRopeConfig(inner, window=3, factor=factor))), expected)


@pytest.mark.parametrize("inner", ROTATIONS, ids=str)
def test_near_pairs_keep_their_logits_and_far_ones_do_not(inner):
    changed = logits_of(SelfExtendConfig(inner, group=4, window=3)) != logits_of(inner)
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    assert not changed[..., distance < 3].any()
    if inner != T5Config():
        # floor(i / 4) + 3 - floor(j / 4) is i - j again for a few of them.
        assert changed[..., distance > 6].all()


@pytest.mark.parametrize("inner", ROTATIONS, ids=str)
def test_all_keys_past_the_window_of_rerope_are_a_window_away(inner):
    """The logit of a far pair is that of the same query and key at distance `window`."""
    query, key = heads()
    logits = positional_logits(build(ReRopeConfig(inner, window=4)), query, key, positions_of(LENGTH))
    for far in (5, 9, 13):
        at_window = Positions(torch.tensor([[9]]) + torch.tensor([[0, 4]]), torch.tensor([[LENGTH]]))
        pair = positional_logits(build(inner), query[:, :, [0, 13]], key[:, :, [13 - far, 0]], at_window)
        torch.testing.assert_close(logits[..., 13, 13 - far], pair[..., 1, 0], rtol=0, atol=1e-5)


def test_a_decoding_step_sees_the_same_far_pairs_as_the_whole_sequence():
    """Keys are cached as the rotation left them; the last query alone gets the last row of the bias."""
    parts = build(SelfExtendConfig(group=2, window=4))
    positions = positions_of(LENGTH)
    query, key = heads()
    phases = parts.query_key_map.phases(positions)
    query, key = parts.query_key_map.map_query(query, phases), parts.query_key_map.map_key(key, phases)
    whole = parts.logit_bias(AttentionPairs(query, key, torch.arange(LENGTH), positions, 0.5))
    step = parts.logit_bias(AttentionPairs(query[:, :, -1:], key, torch.tensor([LENGTH - 1]), positions, 0.5))
    torch.testing.assert_close(step, whole[:, :, -1:], rtol=0, atol=1e-6)
    assert step.abs().max() > 0.1


def test_far_pairs_of_16_bit_heads_are_as_precise_as_near_ones():
    parts = build(SelfExtendConfig(group=2, window=4))
    query, key = heads()
    exact = positional_logits(parts, query, key, positions_of(LENGTH))
    half = positional_logits(parts, query.bfloat16(), key.bfloat16(), positions_of(LENGTH)).float()
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    error = (half - exact).abs()
    near, far = error[..., (distance >= 0) & (distance < 4)].max(), error[..., distance >= 4].max()
    # A far logit is a near one plus a correction: three roundings to 16 bits where a near one has one.
    assert far < 4 * near


def test_both_a_rotation_and_a_distance_bias_follow():
    both = ComposedConfig((RopeConfig(), AlibiConfig()))
    bias = logits_of(SelfExtendConfig(both, group=2, window=4)) - logits_of(SelfExtendConfig(group=2, window=4))
    alone = logits_of(SelfExtendConfig(AlibiConfig(), group=2, window=4)) - logits_of(NoneConfig())
    torch.testing.assert_close(visible(bias), visible(alone), rtol=0, atol=1e-5)


class ReadsQueries(PairwiseBias):
    def forward(self, pairs):
        return pairs.query @ pairs.expanded_key.transpose(-1, -2)


@dataclasses.dataclass(frozen=True)
class ReadsQueriesConfig(SchemeConfig):
    def build(self, context):
        return SchemeParts(logit_bias=ReadsQueries())


@pytest.mark.parametrize("config", [SelfExtendConfig, ReRopeConfig])
def test_schemes_that_would_not_follow_are_refused(config):
    with pytest.raises(ValueError, match="'sinusoidal', which encodes no distances"):
        build(config(SinusoidalConfig()))
    with pytest.raises(ValueError, match="cannot be changed to other positions"):
        build(config(PositionScaleConfig()))
    with pytest.raises(ValueError, match="depends on more than the distance"):
        build(config(ReadsQueriesConfig()))
