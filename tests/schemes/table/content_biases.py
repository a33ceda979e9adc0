"""Biases that read queries, keys or hidden states."""

from __future__ import annotations

from hf_posenc.schemes.bias.cope import CopeConfig
from hf_posenc.schemes.bias.disentangled import DisentangledConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig
from hf_posenc.schemes.bias.grape import GrapeConfig
from hf_posenc.schemes.bias.grape_ap import GrapeApConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig
from hf_posenc.schemes.bias.shaw import ShawConfig
from hf_posenc.schemes.bias.transformer_xl import TransformerXLConfig
from hf_posenc.schemes.bias.wavelet import WaveletConfig
from hf_posenc.schemes.rotary.grape_m import GrapeMConfig
from hf_posenc.schemes.rotary.repo import RepoConfig
from hf_posenc.schemes.rotary.selective_rope import SelectiveRopeConfig

from ..references import content_biases
from .row import Row

ROWS: dict[str, Row] = {
    "forget_gate": Row(
        "logits",
        content_biases.forget_gate,
        (
            ForgetGateConfig(),
            ForgetGateConfig(initial_bias=2.0),
            ForgetGateConfig("bias_only"),
            ForgetGateConfig("bias_only", decay_times=(4.0, 256.0)),
        ),
        causal_only=True,
        everywhere=True,
        marks="+++.++..++-",
    ),
    "shaw": Row(
        "logits",
        content_biases.shaw,
        (
            ShawConfig(max_distance=4),
            ShawConfig(),
            ShawConfig(max_distance=6, max_distance_ahead=2, per_head=True),
            ShawConfig("sinusoidal"),
            ShawConfig("wavelet"),
        ),
        everywhere=True,
        marks="-++.++..-++",
    ),
    "disentangled": Row(
        "logits",
        content_biases.disentangled,
        (
            DisentangledConfig(max_distance=4),
            DisentangledConfig(),
            DisentangledConfig("c2p", max_distance=5),
            DisentangledConfig("p2c", max_distance=20, buckets=6),
        ),
        everywhere=True,
        marks="-++.++..-++",
        causal_marks="-++.++..-++",
    ),
    "wavelet": Row(
        "logits",
        content_biases.wavelet,
        (WaveletConfig(num_scales=4), WaveletConfig()),
        marks="-++.++..-++",
    ),
    "transformer_xl": Row(
        "logits",
        content_biases.transformer_xl,
        (TransformerXLConfig(), TransformerXLConfig(base=100.0, clamp_length=6)),
        marks="+++.++..-++",
    ),
    "cope": Row(
        "logits",
        content_biases.cope,
        # The matrix re-draws tables this small, so that they show.
        (CopeConfig(num_positions=4, initial_std=0.05), CopeConfig(initial_std=0.05)),
        causal_only=True,
        everywhere=True,
        marks="-++.++..-++",
    ),
    "grape": Row(
        "logits",
        content_biases.grape,
        (
            GrapeConfig(),
            GrapeConfig(initial_rate=0.2, normalize=False, gates="both"),
            GrapeConfig(gates="query"),
        ),
        marks="+++.++..++-",
    ),
    "grape_ap": Row(
        "logits",
        content_biases.grape_ap,
        (GrapeApConfig(), GrapeApConfig(width=2)),
        causal_only=True,
        everywhere=True,
        marks="++-.++..++-",
    ),
    "low_rank_relative": Row(
        "logits",
        content_biases.low_rank_relative,
        (LowRankRelativeConfig(rank=4, window=8), LowRankRelativeConfig()),
        causal_only=True,
        marks="-++.++..-++",
    ),
    "repo": Row(
        "logits",
        content_biases.repo,
        (RepoConfig(initial_std=0.2), RepoConfig(theta=100.0, width=5, initial_std=0.2, rotary_dim=8)),
        causal_only=True,
        marks="-++.++..-++",
    ),
    "grape_m": Row(
        "logits",
        content_biases.grape_m,
        (
            GrapeMConfig(),
            GrapeMConfig(theta=100.0, per_head=True, gate_scale=2.0, initial_bias=0.0),
            GrapeMConfig(rotary_dim=8),
        ),
        marks="+++.++..-++",
    ),
    "selective_rope": Row(
        "logits",
        content_biases.selective_rope,
        (
            SelectiveRopeConfig(initial_std=0.2),
            SelectiveRopeConfig(theta=100.0, rank=5, kernel_size=2, gate=True, initial_std=0.2, rotary_dim=8),
        ),
        causal_only=True,
        marks="+++.++..-++",
    ),
}
