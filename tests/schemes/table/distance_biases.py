"""Biases of distance, one number at a time in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hf_posenc.schemes.bias.fire import FireConfig
from hf_posenc.schemes.bias.kerple import KerpleConfig
from hf_posenc.schemes.bias.log_cpb import LogCpbConfig
from hf_posenc.schemes.bias.sandwich import SandwichConfig
from hf_posenc.schemes.bias.swin import SwinConfig
from hf_posenc.schemes.bias.tisa import TisaConfig

from . import coordinates
from .row import LogitCase, Logits, Row, array


def kerple(config: Any, part: Any, heads: int, causal: bool, head: int, distance: int) -> float:
    """arXiv:2205.09921, section 4, with the floor of the authors' code."""
    floor = config.minimum
    r1 = max(part.r1[head].item(), floor)
    if config.variant == "log":
        return -r1 * math.log(1 + max(part.r2[head].item(), floor) * abs(distance))
    exponent = config.exponent if config.exponent is not None else min(max(part.r2[head].item(), floor), 2.0)
    return -r1 * abs(distance) ** exponent


def fire(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2310.04418, section 3: distance over the farthest position, both compressed, through a small network."""
    part = parts.logit_bias
    threshold = abs(part.threshold_factor.item() * config.initial_threshold)

    def compressed(x: float) -> float:
        return math.log(1 + abs(part.c.item()) * x)

    def bias(head: int, query: int, key: int) -> float:
        farthest = case.positions[query] if case.causal else max(case.positions)
        x = compressed(abs(case.distance(key, query))) / (compressed(max(threshold, farthest)) + config.epsilon)
        hidden = np.maximum(array(part.hidden_weight) * x + array(part.hidden_bias), 0)
        return float(array(part.output_weight[head]) @ hidden) + float(part.output_bias[head])

    return case.biased(bias)


def log_cpb_of(config: Any, part: Any, head: int, back: list[int]) -> float:
    """arXiv:2111.09883, equation 4, and the authors' code for a `window`; `back` leads from the key to the query."""
    far = np.log1p(np.abs(back))
    if config.window is not None:
        far = np.log1p(8 * np.abs(back) / (config.window - 1)) / math.log(8)
    hidden = np.maximum(array(part.hidden_weight) @ (np.sign(back) * far) + array(part.hidden_bias), 0)
    return float(config.limit / (1 + math.exp(-array(part.output_weight[head]) @ hidden)))


def swin(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2103.14030, equation 4, for tokens that fill the grid row by row; past the table, its edge."""
    weight = parts.logit_bias.weight.tolist()

    def bias(head: int, *pair: int) -> float:
        positions = [case.positions[token] for token in pair]
        without = [position < config.num_prefix_tokens for position in positions]
        if any(without):
            entry = 2 if all(without) else without.index(True)
            return weight[len(weight) - 3 + entry][head] if config.class_entries else 0.0
        index = 0
        places = [coordinates.place(position, config.grid[1:], config.num_prefix_tokens) for position in positions]
        for here, there, size in zip(*places, config.grid, strict=True):
            index = index * (2 * size - 1) + min(max(here - there + size - 1, 0), 2 * size - 2)
        return weight[index][head]

    return case.biased(bias)


ROWS: dict[str, Row] = {
    "kerple": Row(
        "bias",
        kerple,
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
        fire,
        (
            FireConfig(initial_threshold=8.0),
            FireConfig(width=4, initial_c=2.0, initial_threshold=10.0, epsilon=0.01, shared=True),
        ),
        everywhere=True,
        marks="+-+.++..++-",
        # Divided by the query's own position: a prefix keeps its encodings, and a shift changes them.
        causal_marks="++-.++..++-",
    ),
    "log_cpb": Row(
        "bias",
        lambda config, part, heads, causal, head, distance: log_cpb_of(config, part, head, [-distance]),
        (LogCpbConfig(width=16), LogCpbConfig(9, 8, 4.0, shared=True)),
        marks="+++.++..---",
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
        swin,
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
