"""Schemes at other positions, one pair of tokens at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hf_posenc.schemes import (
    AlibiConfig,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    NoneConfig,
    RopeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)
from hf_posenc.schemes.parts import HIDDEN
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig, PositionShiftConfig
from hf_posenc.schemes.position_maps.attention_sinks import AttentionSinksConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig
from hf_posenc.schemes.position_maps.dual_chunk import DualChunkConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig

from . import seeds
from .row import LogitCase, Logits, Row, dot


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
    frequencies, factor = seeds.scaled_spectrum(config.scaling, config.theta, width, 56)
    return seeds.rotate(vector, frequencies, config.layout, steps, factor**2)


def bias(config: Any, part: Any, heads: int, causal: bool, head: int, steps: float) -> float:
    if config.name == "t5":
        return seeds.t5(config, part, heads, causal, head, -int(steps))
    return -seeds.alibi_slope(heads, head) * abs(steps)


def by_distance(distance: Callable[[Any, int, int], float], option: str = "inner") -> Callable[..., Logits]:
    """The reference of a scheme whose inner one sees `distance(config, query position, key position)`."""

    def reference(config: Any, parts: Any, case: LogitCase) -> Logits:
        return distance_logits(getattr(config, option), parts, case, functools.partial(distance, config))

    return reference


def position_shift(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    vectors = {"sinusoidal": seeds.sinusoidal, "learned": seeds.learned, "integer": seeds.integer}
    return vectors[config.inner.name](config.inner, part.inner, hidden, position + config.offset, 0)


def self_extend(config: Any, query: int, key: int) -> float:
    """arXiv:2401.01325."""
    if query - key < config.window:
        return query - key
    return query // config.group + config.window - config.window // config.group - key // config.group


def rerope(config: Any, query: int, key: int) -> float:
    """kexue.fm/archives/9708."""
    steps = query - key
    if steps < config.window:
        return steps
    return config.window if config.factor is None else config.window + (steps - config.window) / config.factor


def attention_sinks(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2309.17453: a cache of the sinks, the last `window - 1` tokens and the query, numbered from 0."""

    def place(query: int, key: int) -> int | None:
        kept = [*range(config.sinks), *range(max(config.sinks, query - config.window + 1), query + 1)]
        return kept.index(query) - kept.index(key) if query >= config.sinks and key in kept else None

    def distance(query: int, key: int) -> float:
        found = place(query, key)
        return query - key if found is None else found

    def hidden(query: int, key: int) -> bool:
        return config.sinks <= key <= query and place(query, key) is None

    inner, numbers = config.inner, case.positions
    if inner.name == "none":
        shown = case.logits(case.product)
    else:
        shown = distance_logits(inner, summand(parts), case, distance)
    return case.logits(lambda head, i, j: shown[head][i][j] + HIDDEN * hidden(numbers[i], numbers[j]))


def summand(parts: Any) -> Any:
    """The parts, with the bias that has learned weights in place of the sum."""
    members = getattr(parts.logit_bias, "parts", [parts.logit_bias])
    return SchemeParts(parts.additive, parts.query_key_map, members[-1], parts.logit_scale)


def dual_chunk(config: Any, query: int, key: int) -> float:
    """arXiv:2402.17463: three positions of a query, one for the keys of each kind of chunk, which restart in each."""
    size = config.chunk_size - config.local_size
    within = query % size
    kinds = (within, min(within + size, config.chunk_size), min(2 * size - 1, config.chunk_size))
    chunks = query // size - key // size
    # Keys after the query are not compared.
    return query - key if chunks < 0 else kinds[min(chunks, 2)] - key % size


ROPE = RopeConfig(layout="half")

ROWS: dict[str, Row] = {
    # The table runs outside training, where the draw of arXiv:2305.16843 gives way to the tokens' own positions. The
    # first variant has a scheme that Llama's own differs from.
    "randomized": Row(
        "logits",
        by_distance(lambda config, query, key: query - key),
        (
            RandomizedConfig(AlibiConfig(), max_position=64),
            RandomizedConfig(ROPE, max_position=64, kind="float"),
            RandomizedConfig(T5Config(), max_position=64),
        ),
        reach=(64, 64, 64),
        everywhere=True,
        marks="++++++.++++",
    ),
    "position_shift": Row(
        "additive",
        position_shift,
        (
            PositionShiftConfig(SinusoidalConfig(), offset=5),
            PositionShiftConfig(LearnedConfig(num_positions=70), offset=2),
            PositionShiftConfig(IntegerConfig(direction="learned")),
        ),
        reach=(None, 68, None),
        marks="++++++.++++",
    ),
    "position_scale": Row(
        "logits",
        by_distance(lambda config, query, key: config.factor * query - config.factor * key),
        (
            PositionScaleConfig(ROPE, factor=0.25),
            PositionScaleConfig(RopeConfig(theta=500.0, rotary_dim=8, layout="interleaved"), factor=2.0),
            PositionScaleConfig(AlibiConfig(), factor=1.5),
            PositionScaleConfig(T5Config(), factor=3),
        ),
        marks="++++++.++++",
    ),
    "position_clamp": Row(
        "logits",
        by_distance(lambda config, query, key: min(query, config.maximum) - min(key, config.maximum)),
        (PositionClampConfig(ROPE, maximum=6), PositionClampConfig(AlibiConfig(), maximum=20)),
        marks="-+--++.++++",
    ),
    "hierarchical": Row(
        "logits",
        # arXiv:2401.16421: what attention sees is the number of the segment.
        by_distance(
            lambda config, query, key: query // config.segment_length - key // config.segment_length, "segment"
        ),
        (
            HierarchicalConfig(segment=ROPE, segment_length=4),
            HierarchicalConfig(LearnedConfig(num_positions=8), AlibiConfig(), 10, max_segment_length=8),
            HierarchicalConfig(segment=T5Config(), segment_length=3),
        ),
        everywhere=True,
        marks="++--++-++++",
    ),
    "self_extend": Row(
        "logits",
        by_distance(self_extend),
        (
            SelfExtendConfig(ROPE, group=2, window=4),
            SelfExtendConfig(RopeConfig(theta=500.0, rotary_dim=8, layout="interleaved"), group=3, window=10),
            SelfExtendConfig(RopeConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0), layout="half"), group=4, window=6),
            SelfExtendConfig(AlibiConfig(), group=2, window=4),
            SelfExtendConfig(T5Config(), group=4, window=7),
        ),
        causal_only=True,
        marks="-+-.++.++++",
    ),
    "rerope": Row(
        "logits",
        by_distance(rerope),
        (
            ReRopeConfig(ROPE, window=4),
            ReRopeConfig(RopeConfig(scaling=LinearScaling(2.0), layout="interleaved"), window=10, factor=3.0),
            ReRopeConfig(AlibiConfig(), window=5, factor=2.0),
        ),
        causal_only=True,
        marks="-++.++.++++",
    ),
    "attention_sinks": Row(
        "logits",
        attention_sinks,
        (
            AttentionSinksConfig(ROPE, sinks=2, window=4),
            AttentionSinksConfig(RopeConfig(scaling=LinearScaling(2.0), layout="interleaved"), sinks=1, window=6),
            AttentionSinksConfig(AlibiConfig(), sinks=1, window=5),
            AttentionSinksConfig(T5Config(), sinks=3, window=2),
            AttentionSinksConfig(NoneConfig(), sinks=2, window=3),
        ),
        causal_only=True,
        marks="-+-.++.++++",
    ),
    "dual_chunk": Row(
        "logits",
        by_distance(dual_chunk),
        (
            DualChunkConfig(ROPE, chunk_size=5, local_size=2),
            DualChunkConfig(RopeConfig(theta=500.0, rotary_dim=8, layout="interleaved"), chunk_size=4, local_size=1),
            DualChunkConfig(RopeConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0)), chunk_size=11, local_size=3),
            DualChunkConfig(AlibiConfig(), chunk_size=7, local_size=3),
            DualChunkConfig(T5Config(), chunk_size=10, local_size=2),
        ),
        causal_only=True,
        marks="-+-.++.++++",
    ),
}
