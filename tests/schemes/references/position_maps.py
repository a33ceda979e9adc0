"""Schemes at other positions, one pair of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from . import seeds

Logits = list[list[list[float]]]


def distance_logits(config: Any, part: Any, case: Any, distance: Callable[[int, int], float]) -> Logits:
    """RoPE or ALiBi, by the number that `distance(query position, key position)` returns (positive in the past)."""
    logits = []
    for head, (queries, keys) in enumerate(zip(case.query, case.key, strict=True)):
        rows = []
        for query, at in zip(queries, case.positions, strict=True):
            row = []
            for key, of in zip(keys, case.positions, strict=True):
                steps = distance(at, of)
                if config.name == "rope":
                    turned = rope(config, query, steps)
                    row.append(case.scaling * sum(a * b for a, b in zip(turned, key, strict=True)))
                else:
                    product = case.scaling * sum(a * b for a, b in zip(query, key, strict=True))
                    row.append(product + bias(config, part, len(case.query), case.causal, head, steps))
            rows.append(row)
        logits.append(rows)
    return logits


def rope(config: Any, vector: list[float], steps: float) -> list[float]:
    """A rotation by any real number of steps, which the relative form of RoPE allows."""
    width = config.rotary_dim or len(vector)
    frequencies = [config.theta ** (-2 * pair / width) for pair in range(width // 2)]
    factor = 1.0
    if config.scaling is not None:
        frequencies, factor = seeds.scaled_spectrum(config.scaling, config.theta, width, 56)
    turned = list(vector)
    for pair, frequency in enumerate(frequencies):
        first, second = (2 * pair, 2 * pair + 1) if config.layout == "interleaved" else (pair, pair + width // 2)
        cosine, sine = math.cos(steps * frequency), math.sin(steps * frequency)
        turned[first] = factor**2 * (vector[first] * cosine - vector[second] * sine)
        turned[second] = factor**2 * (vector[first] * sine + vector[second] * cosine)
    return turned


def bias(config: Any, part: Any, heads: int, causal: bool, head: int, steps: float) -> float:
    if config.name == "t5":
        return seeds.t5(config, part, heads, causal, head, -int(steps))
    return -seeds.alibi_slope(heads, head) * abs(steps)


def inner_part(parts: Any) -> Any:
    return getattr(parts.logit_bias, "inner", None)


def identity(config: Any, parts: Any, case: Any) -> Logits:
    """Outside training, arXiv:2305.16843's positions are the tokens' own."""
    return distance_logits(config.inner, inner_part(parts), case, lambda query, key: query - key)


def position_scale(config: Any, parts: Any, case: Any) -> Logits:
    return distance_logits(config.inner, inner_part(parts), case, lambda i, j: config.factor * i - config.factor * j)


def position_clamp(config: Any, parts: Any, case: Any) -> Logits:
    def distance(query: int, key: int) -> float:
        return min(query, config.maximum) - min(key, config.maximum)

    return distance_logits(config.inner, inner_part(parts), case, distance)


def position_shift(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    vectors = {"sinusoidal": seeds.sinusoidal, "learned": seeds.learned, "integer": seeds.integer}
    return vectors[config.inner.name](config.inner, part.inner, hidden, position + config.offset, 0)


def hierarchical(config: Any, parts: Any, case: Any) -> Logits:
    """arXiv:2401.16421: what attention sees is the number of the segment."""

    def distance(query: int, key: int) -> float:
        return query // config.segment_length - key // config.segment_length

    return distance_logits(config.segment, inner_part(parts), case, distance)


def self_extend(config: Any, parts: Any, case: Any) -> Logits:
    """arXiv:2401.01325."""

    def distance(query: int, key: int) -> float:
        if query - key < config.window:
            return query - key
        shift = config.window - config.window // config.group
        return query // config.group + shift - key // config.group

    return distance_logits(config.inner, inner_part(parts), case, distance)


def rerope(config: Any, parts: Any, case: Any) -> Logits:
    """kexue.fm/archives/9708."""

    def distance(query: int, key: int) -> float:
        steps = query - key
        if steps < config.window:
            return steps
        return config.window if config.factor is None else config.window + (steps - config.window) / config.factor

    return distance_logits(config.inner, inner_part(parts), case, distance)
