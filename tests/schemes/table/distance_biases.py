"""Biases that are functions of distance or position."""

from __future__ import annotations

import math

from hf_posenc.schemes.bias.fire import FireConfig
from hf_posenc.schemes.bias.kerple import KerpleConfig
from hf_posenc.schemes.bias.sandwich import SandwichConfig
from hf_posenc.schemes.bias.swin import SwinConfig
from hf_posenc.schemes.bias.tisa import TisaConfig

from ..references import distance_biases
from .row import Row

ROWS: dict[str, Row] = {
    "kerple": Row(
        "bias",
        distance_biases.kerple,
        (
            KerpleConfig(),
            KerpleConfig("power"),
            KerpleConfig("power", exponent=1.5),
            KerpleConfig(minimum=0.5, shared=False),
        ),
        marks="+++.++..+--",
    ),
    "fire": Row(
        "logits",
        distance_biases.fire,
        (
            FireConfig(initial_threshold=8.0),
            FireConfig(width=4, initial_c=2.0, initial_threshold=10.0, epsilon=0.01, shared=True),
        ),
        everywhere=True,
        marks="+-+.++..++-",
        # Divided by the query's own position: a prefix keeps its encodings, and a shift changes them.
        causal_marks="++-.++..++-",
    ),
    "sandwich": Row(
        "bias",
        # The product of two interleaved sinusoidal vectors (arXiv:1706.03762), at position 0 and at the distance.
        lambda config, part, heads, causal, head, distance: (
            heads
            / (8 * (head + 1))
            * sum(math.cos(distance / config.base ** (2 * pair / config.width)) for pair in range(config.width // 2))
        ),
        (SandwichConfig(), SandwichConfig(width=10, base=50.0)),
        marks="+++.++..+--",
    ),
    "swin": Row(
        "logits",
        distance_biases.swin,
        (
            SwinConfig((3, 4)),
            SwinConfig((2, 3, 4), interpolation="none", shared=True),
            SwinConfig((4, 4), class_entries=True, num_prefix_tokens=2),
        ),
        marks="-+-.+++.-++",
    ),
    "tisa": Row(
        "bias",
        # arXiv:2106.01950: radial basis functions of key position minus query position.
        lambda config, part, heads, causal, head, distance: sum(
            amplitude * math.exp(-abs(sharpness) * (distance - offset) ** 2)
            for amplitude, sharpness, offset in zip(
                part.amplitudes[head].tolist(), part.sharpness[head].tolist(), part.offsets[head].tolist(), strict=True
            )
        ),
        (TisaConfig(), TisaConfig(num_kernels=2)),
        marks="-++.++..---",
    ),
}
