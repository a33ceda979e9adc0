"""Biases that read queries, keys or hidden states, from the papers, in double precision: mostly one pair at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

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

from .row import LogitCase, Logits, Row, array, dot
from .seeds import alibi_slope, rope_spectrum, rotate


def logistics(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def forget_gate(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2503.02130: the product of all gates from behind the key up to the query, inside the softmax."""
    offsets = parts.logit_bias.bias.tolist()

    def gate(head: int, token: int) -> float:
        weights = parts.logit_bias.weight[head].tolist()
        return logistic(dot(weights, case.hidden[token]) + offsets[head])

    def bias(head: int, query: int, key: int) -> float:
        if config.gate == "bias_only":
            return (case.distance(query, key)) * math.log(logistic(offsets[head]))
        return math.log(math.prod(gate(head, token) for token in range(key + 1, query + 1)))

    return case.biased(bias)


def sinusoid(position: float, width: int, base: float = 10000.0) -> list[float]:
    """All sines, then all cosines."""
    angles = [position * base ** (-2 * pair / width) for pair in range(width // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def ricker_family(distance: float, width: int, num_scales: int) -> list[float]:
    """arXiv:2502.02004: all scales, each with all shifts."""
    u = (distance - np.arange(width // num_scales)) / 2.0 ** np.arange(num_scales)[:, None]
    values: list[float] = ((1 - u * u) * np.exp(-u * u / 2)).flatten().tolist()
    return values


def shaw(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:1803.02155, eq. 4: a vector of the relation is added to the key."""
    width = len(case.query[0][0])
    behind = config.max_distance or 16
    ahead = behind if config.max_distance_ahead is None else config.max_distance_ahead

    def relation(head: int, query: int, key: int) -> list[float]:
        distance = case.positions[key] - case.positions[query]
        if config.table == "sinusoidal":
            return sinusoid(distance, width)
        if config.table == "wavelet":
            return ricker_family(-distance, width, 8)
        table = parts.logit_bias.weight[head] if config.per_head else parts.logit_bias.weight
        assert len(table) == behind + 1 + ahead
        row: list[float] = table[max(-behind, min(ahead, distance)) + behind].tolist()
        return row

    return case.biased(lambda head, query, key: case.scaling * dot(case.query[head][query], relation(head, query, key)))


def disentangled_row(config: Any, distance: int) -> int:
    """arXiv:2006.03654, eq. 3, for the distance i - j; with buckets as in the code of DeBERTa-v2."""
    span = config.buckets or config.max_distance
    steps = abs(distance)
    if config.buckets and steps > span // 2:
        middle = span // 2
        share = math.log(steps / middle) / math.log((config.max_distance - 1) / middle)
        # The rounding of float64 must not lift a whole number over the next bucket.
        steps = middle + math.ceil(share * (middle - 1) - 1e-9)
        distance = steps if distance > 0 else -steps
    if distance <= -span:
        return 0
    return 2 * span - 1 if distance >= span else distance + span


def disentangled(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2006.03654, eq. 4. The rows of later keys come first, and are missing in a causal model."""
    bias = parts.logit_bias
    span = config.buckets or config.max_distance

    def product(vector: list[float], table: Any, distance: int) -> float:
        row = disentangled_row(config, distance)
        return dot(vector, table[max(row - span, 0) if len(table) == span else row].tolist())

    def value(head: int, query: int, key: int) -> float:
        total, distance = 0.0, case.distance(query, key)
        if "c2p" in config.terms:
            total += product(case.query[head][query], bias.key_weight[head], distance)
        if "p2c" in config.terms:
            total += product(case.key[head][key], bias.query_weight[head], distance)
        return case.scaling * total

    divisor = math.sqrt(2 + config.terms.count("|"))
    return [[[logit / divisor for logit in row] for row in rows] for rows in case.biased(value)]


def wavelet(config: Any, parts: Any, case: LogitCase) -> Logits:
    width = len(case.query[0][0])

    def bias(head: int, query: int, key: int) -> float:
        values = ricker_family(case.distance(query, key), width, config.num_scales)
        return case.scaling * dot(case.query[head][query], values)

    return case.biased(bias)


def transformer_xl(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:1901.02860, section 3.3: terms (b), (c) and (d)."""
    for_keys, for_distances = array(parts.logit_bias.content_bias), array(parts.logit_bias.position_bias)
    projection = array(parts.logit_bias.position_projection).reshape(len(case.query), -1, len(case.hidden[0]))

    def bias(head: int, query: int, key: int) -> float:
        distance = case.distance(query, key)
        if config.clamp_length is not None:
            distance = max(-config.clamp_length, min(config.clamp_length, distance))
        projected = projection[head] @ sinusoid(distance, len(case.hidden[0]), config.base)
        position = (array(case.query[head][query]) + for_distances[head]) @ projected
        return case.scaling * float(for_keys[head] @ case.key[head][key] + position)

    return case.biased(bias)


def cope(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2405.18719, eq. 3 to 7, with the scaled logits of the listing."""
    table = parts.logit_bias.weight.tolist()

    def bias(head: int, query: int, key: int) -> float:
        position = sum(logistic(case.product(head, query, token)) for token in range(key, query + 1))
        position = min(position, len(table) - 1)
        low, high = math.floor(position), math.ceil(position)
        share = position - low
        below, above = dot(case.query[head][query], table[low]), dot(case.query[head][query], table[high])
        return share * above + (1 - share) * below

    return case.biased(bias)


def grape(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2512.07805, the gated additive forms with the official code's slopes."""
    rates = parts.logit_bias.rate.tolist()

    def gate(directions: Any, vectors: Any) -> np.ndarray:
        """Of head and token."""
        if directions is None:
            return np.zeros((len(rates), len(case.hidden)))
        of_heads = array(directions)
        if config.normalize:
            of_heads /= np.linalg.norm(of_heads, axis=1, keepdims=True)
        return np.log1p(np.exp(np.einsum("hc,htc->ht", of_heads, vectors) / math.sqrt(of_heads.shape[1])))

    keys, queries = gate(parts.logit_bias.direction, case.key), gate(parts.logit_bias.query_direction, case.query)

    def bias(head: int, query: int, key: int) -> float:
        slope = alibi_slope(len(case.query), head) * math.log(1 + math.exp(rates[head]))
        return -abs(case.distance(query, key)) * slope * float(keys[head, key] + queries[head, query])

    return case.biased(bias)


def grape_ap(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2512.07805, the path-integral form with the official code's vectors: one penalty per token in between."""
    half, positions = config.width // 2, array(case.positions)
    # Of head, component and token.
    vectors = array(parts.logit_bias.projection) @ array(case.hidden).T
    scaled = vectors / np.sqrt((vectors**2).mean(axis=1, keepdims=True))
    first, second, cosine, sine = scaled[:, :half], scaled[:, half:], np.cos(positions), np.sin(positions)
    turned = np.concatenate((first * cosine + second * sine, second * cosine - first * sine), axis=1)
    penalties = np.log(logistics(np.einsum("hci,hcj->hij", vectors, turned) / config.width))

    def bias(head: int, query: int, key: int) -> float:
        return alibi_slope(len(case.query), head) * float(penalties[head, query, key + 1 : query + 1].sum())

    return case.biased(bias)


def low_rank_relative(config: Any, parts: Any, case: LogitCase) -> Logits:
    """A mixture of profiles per query token; nothing beyond their length."""
    profiles = array(parts.logit_bias.profiles)
    mixtures = (array(parts.logit_bias.projection) @ array(case.hidden).T).reshape(-1, config.rank, len(case.hidden))

    def bias(head: int, query: int, key: int) -> float:
        distance = case.distance(query, key)
        return float(mixtures[head, :, query] @ profiles[:, distance]) if 0 <= distance < config.window else 0.0

    return case.biased(bias)


def rotated_products(case: LogitCase, parts: Any, angles: np.ndarray) -> Logits:
    """The scaled products after all pairs of both are turned by `angles[key head, token, pair]`."""
    groups = parts.logit_bias.groups
    return case.mapped(
        lambda vector, head, token: rotate(vector, angles[head // groups, token].tolist(), "half", 1, 1.0)
    )


def spectrum_of(config: Any, case: LogitCase) -> np.ndarray:
    return array(rope_spectrum(config.theta, config.rotary_dim or len(case.query[0][0])))


def repo(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2512.14391, section 3, with the official code's gated projection: a position for each token and head."""
    bias, hidden = parts.logit_bias, array(case.hidden).T
    values = array(bias.gate) @ hidden
    gated = values * logistics(values) * (array(bias.content) @ hidden)
    places = array(bias.places_of_heads) @ gated
    return rotated_products(case, parts, places[:, :, None] * spectrum_of(config, case))


def grape_m(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2512.07805, contextual GRAPE-M: the place is the sum of the increments of all earlier tokens."""
    bias = parts.logit_bias
    frequencies = spectrum_of(config, case) * np.exp(array(bias.rotation.log_offsets))
    gates = (array(bias.weight) @ array(case.hidden).T + array(bias.bias)[:, None]) / config.gate_scale
    increments = logistics(gates if config.per_head else gates[:1])
    places = np.cumsum(increments, axis=1) - increments
    heads = np.broadcast_to(places, (len(case.query) // bias.groups, places.shape[1]))
    return rotated_products(case, parts, heads[:, :, None] * frequencies)


def selective_rope(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2511.17388, with the official code's projections: convolved angles, summed over the tokens."""
    bias, hidden = parts.logit_bias, array(case.hidden)
    groups = hidden.reshape(len(hidden), len(bias.up), -1)
    inputs = (groups / np.linalg.norm(groups, axis=-1, keepdims=True)).reshape(hidden.shape)
    # Of head, pair and token.
    projected = array(bias.up) @ (array(bias.down) @ inputs.T)
    convolved = np.zeros_like(projected)
    for steps in range(config.kernel_size):
        earlier = projected[:, :, : len(inputs) - steps]
        convolved[:, :, steps:] += array(bias.kernel)[:, :, -1 - steps, None] * earlier
    if config.gate:
        convolved *= logistics(array(bias.gate_weight) @ inputs.T + array(bias.gate_bias)[:, None])[:, None]
    sums = convolved.cumsum(axis=-1).swapaxes(1, 2)
    return rotated_products(case, parts, sums * spectrum_of(config, case))


ROWS: dict[str, Row] = {
    "forget_gate": Row(
        "logits",
        forget_gate,
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
        shaw,
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
        disentangled,
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
        wavelet,
        (WaveletConfig(num_scales=4), WaveletConfig()),
        marks="-++.++..-++",
    ),
    "transformer_xl": Row(
        "logits",
        transformer_xl,
        (TransformerXLConfig(), TransformerXLConfig(base=100.0, clamp_length=6)),
        marks="+++.++..-++",
    ),
    "cope": Row(
        "logits",
        cope,
        # The matrix re-draws tables this small, so that they show.
        (CopeConfig(num_positions=4, initial_std=0.05), CopeConfig(initial_std=0.05)),
        causal_only=True,
        everywhere=True,
        marks="-++.++..-++",
    ),
    "grape": Row(
        "logits",
        grape,
        (
            GrapeConfig(),
            GrapeConfig(initial_rate=0.2, normalize=False, gates="both"),
            GrapeConfig(gates="query"),
        ),
        marks="+++.++..++-",
    ),
    "grape_ap": Row(
        "logits",
        grape_ap,
        (GrapeApConfig(), GrapeApConfig(width=2)),
        causal_only=True,
        everywhere=True,
        marks="++-.++..++-",
    ),
    "low_rank_relative": Row(
        "logits",
        low_rank_relative,
        (LowRankRelativeConfig(rank=4, window=8), LowRankRelativeConfig()),
        causal_only=True,
        marks="-++.++..-++",
    ),
    "repo": Row(
        "logits",
        repo,
        (RepoConfig(initial_std=0.2), RepoConfig(theta=100.0, width=5, initial_std=0.2, rotary_dim=8)),
        causal_only=True,
        marks="-++.++..-++",
    ),
    "grape_m": Row(
        "logits",
        grape_m,
        (
            GrapeMConfig(),
            GrapeMConfig(theta=100.0, per_head=True, gate_scale=2.0, initial_bias=0.0),
            GrapeMConfig(rotary_dim=8),
        ),
        marks="+++.++..-++",
    ),
    "selective_rope": Row(
        "logits",
        selective_rope,
        (
            SelectiveRopeConfig(initial_std=0.2),
            SelectiveRopeConfig(theta=100.0, rank=5, kernel_size=2, gate=True, initial_std=0.2, rotary_dim=8),
        ),
        causal_only=True,
        marks="+++.++..-++",
    ),
}
