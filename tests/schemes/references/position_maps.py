"""Schemes at other positions, one pair of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..table.row import LogitCase, Logits, dot
from . import seeds


def distance_logits(config: Any, parts: Any, case: LogitCase, distance: Callable[[int, int], float]) -> Logits:
    """RoPE or a bias, by the number that `distance(query position, key position)` returns (positive in the past)."""
    part = getattr(parts.logit_bias, "inner", None)

    def logit(head: int, i: int, j: int) -> float:
        steps = distance(case.positions[i], case.positions[j])
        if config.name == "rope":
            return case.scaling * dot(rope(config, case.query[head][i], steps), case.key[head][j])
        return case.product(head, i, j) + bias(config, part, len(case.query), case.causal, head, steps)

    return case.logits(logit)


def rope(config: Any, vector: list[float], steps: float) -> list[float]:
    """A rotation by any real number of steps, which the relative form of RoPE allows."""
    width = config.rotary_dim or len(vector)
    frequencies, factor = seeds.rope_spectrum(config.theta, width), 1.0
    if config.scaling is not None:
        frequencies, factor = seeds.scaled_spectrum(config.scaling, config.theta, width, 56)
    return seeds.rotate(vector, frequencies, config.layout, steps, factor**2)


def bias(config: Any, part: Any, heads: int, causal: bool, head: int, steps: float) -> float:
    if config.name == "t5":
        return seeds.t5(config, part, heads, causal, head, -int(steps))
    return -seeds.alibi_slope(heads, head) * abs(steps)


def identity(config: Any, parts: Any, case: LogitCase) -> Logits:
    """Outside training, arXiv:2305.16843's positions are the tokens' own."""
    return distance_logits(config.inner, parts, case, lambda query, key: query - key)


def position_scale(config: Any, parts: Any, case: LogitCase) -> Logits:
    return distance_logits(config.inner, parts, case, lambda i, j: config.factor * i - config.factor * j)


def position_clamp(config: Any, parts: Any, case: LogitCase) -> Logits:
    def distance(query: int, key: int) -> float:
        return min(query, config.maximum) - min(key, config.maximum)

    return distance_logits(config.inner, parts, case, distance)


def position_shift(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    vectors = {"sinusoidal": seeds.sinusoidal, "learned": seeds.learned, "integer": seeds.integer}
    return vectors[config.inner.name](config.inner, part.inner, hidden, position + config.offset, 0)


def hierarchical(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2401.16421: what attention sees is the number of the segment."""

    def distance(query: int, key: int) -> float:
        return query // config.segment_length - key // config.segment_length

    return distance_logits(config.segment, parts, case, distance)


def self_extend(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2401.01325."""

    def distance(query: int, key: int) -> float:
        if query - key < config.window:
            return query - key
        shift = config.window - config.window // config.group
        return query // config.group + shift - key // config.group

    return distance_logits(config.inner, parts, case, distance)


def rerope(config: Any, parts: Any, case: LogitCase) -> Logits:
    """kexue.fm/archives/9708."""

    def distance(query: int, key: int) -> float:
        steps = query - key
        if steps < config.window:
            return steps
        return config.window if config.factor is None else config.window + (steps - config.window) / config.factor

    return distance_logits(config.inner, parts, case, distance)
