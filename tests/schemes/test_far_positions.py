"""Far positions: Self-Extend, ReRoPE, dual chunks and attention sinks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_posenc.schemes import (
    AlibiConfig,
    BuildContext,
    ComposedConfig,
    DualChunkConfig,
    NoneConfig,
    ReRopeConfig,
    RopeConfig,
    SchemeConfig,
    SelfExtendConfig,
)
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.position_maps.attention_sinks import AttentionSinksConfig

from .building import LENGTH, TOKENS, build, logits_of as logits, random_heads

DISTANCE = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)


def attended(config: SchemeConfig) -> Tensor:
    """Causal attention over the vectors that the fixtures were made with, which are queries, keys and values alike."""
    hidden = torch.tensor(
        [[[[2 * math.sin(1 + 3 * token + 5 * component) for component in range(4)] for token in range(LENGTH)]]]
    )
    parts = config.build(BuildContext(4, 1, 4))
    logits = positional_logits(parts, hidden, hidden, TOKENS)
    return (logits.masked_fill(DISTANCE < 0, -torch.inf).softmax(-1) @ hidden)[0, 0, [9, 13]]


# Each fixture is the attention output of queries 9 and 13: the function was run with identity projections on the
# vectors of `attended` (one head of four dimensions, RoPE of base 10000), a causal mask, and no query scale by log n.
OFFICIAL = [
    # `self_extend_forward` of github.com/datamllab/LongLM (legacy_patch_before_4_38/llama_self_extend_patch.py).
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
    # `forward` of github.com/HKUNLP/ChunkLlama (chunkllama_attn_replace.py), which gives the same when it decodes. Both
    # queries are near the start of their chunk, and then both at its end.
    (
        DualChunkConfig(chunk_size=6, local_size=2),
        [[0.205816, 1.8176, 0.825352, -1.349358], [0.921613, 1.656368, 0.018086, -1.646108]],
    ),
    (
        DualChunkConfig(chunk_size=7, local_size=2),
        [[0.204807, 1.843253, 0.840915, -1.366182], [1.062186, 1.723215, -0.084564, -1.77119]],
    ),
    # `llama_pos_shift_attention_forward` of attention_sinks 0.4.0, the package of StreamingLLM's code, one token at a
    # time, with `AttentionSinkKVCache(sinks, window - 1)`.
    (
        AttentionSinksConfig(sinks=2, window=4),
        [[0.364306, 1.861916, 0.692005, -1.469325], [1.358547, 1.666877, -0.412888, -1.901118]],
    ),
]


@pytest.mark.parametrize(("config", "expected"), OFFICIAL, ids=lambda value: str(value)[:40])
def test_attention_equals_the_official_code(config: SchemeConfig, expected: list[list[float]]) -> None:
    torch.testing.assert_close(attended(config), torch.tensor(expected), rtol=0, atol=3e-6)


def test_real_positions_are_far_where_the_formula_says() -> None:
    """The sinks and the chunks end between two whole positions."""
    ids = torch.arange(0.0, 30.0, 0.25).unsqueeze(0)
    query, key = ids.double().transpose(0, 1), ids.double()
    distance, size, local = query - key, 9, 3
    sinks = AttentionSinksConfig(sinks=2, window=5)
    hidden, far = distance >= 5, (distance >= 5) & (key < 2)
    expected = torch.where(far, query.clamp(max=6) - key, distance)
    past = distance >= 0
    assert torch.equal(sinks.are_hidden(ids, ids)[0] & past, hidden & ~far)
    shown = past & (far | ~hidden)
    assert torch.equal(sinks.distance(ids, ids)[0, shown], -expected[shown].float())
    chunks, length = DualChunkConfig(chunk_size=size, local_size=local), size - local
    before = (query // length) - (key // length)
    near = (query % length + length).clamp(max=size) - key % length
    expected = torch.where(before == 0, distance, torch.where(before == 1, near, size - key % length))
    assert torch.equal(chunks.distance(ids, ids)[0, past], -expected[past].float())


def test_far_pairs_of_16_bit_heads_are_as_precise_as_near_ones() -> None:
    parts = build(SelfExtendConfig(group=2, window=4))
    query, key = random_heads(LENGTH)
    half = positional_logits(parts, query.bfloat16(), key.bfloat16(), TOKENS).float()
    error = (half - logits(parts)).abs()
    near, far = error[..., (DISTANCE >= 0) & (DISTANCE < 4)].max(), error[..., DISTANCE >= 4].max()
    # A far logit is a near one plus a correction: three roundings to 16 bits where a near one has one.
    assert far < 4 * near


def test_both_a_rotation_and_a_distance_bias_follow() -> None:
    both = ComposedConfig((RopeConfig(), AlibiConfig()))
    bias = logits(SelfExtendConfig(both, group=2, window=4)) - logits(SelfExtendConfig(group=2, window=4))
    alone = logits(SelfExtendConfig(AlibiConfig(), group=2, window=4)) - logits(NoneConfig())
    torch.testing.assert_close(bias.tril(), alone.tril(), rtol=0, atol=1e-5)
