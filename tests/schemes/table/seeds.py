"""Every scheme once more: slow Python written from the papers, with arrays of numpy, in double precision."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hf_posenc.schemes import (
    AlibiConfig,
    BinaryConfig,
    ClippedScaling,
    DynamicScaling,
    DynamicYarnScaling,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoneConfig,
    NormalizedIntegerConfig,
    NtkScaling,
    PRopeConfig,
    RopeConfig,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)

from .row import Row


def unit(direction: str, part: Any, hidden: int) -> list[float]:
    if direction == "ones":
        return [1.0] * hidden
    if direction == "one_hot":
        return [math.sqrt(hidden)] + [0.0] * (hidden - 1)
    if direction == "learned":
        return part.direction.tolist()
    raise NotImplementedError(direction)


def integer(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    return [config.scale * position * component for component in unit(config.direction, part, hidden)]


def normalized_integer(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    divisor = config.length or length
    if config.subtract_one:
        divisor -= 1
    return [config.scale * position / divisor * component for component in unit(config.direction, part, hidden)]


def binary(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    bits = config.bits or math.ceil(math.log2(64))
    digits = [int(digit) for digit in reversed(format(position, f"0{bits}b"))]
    return [config.scale * digits[math.floor(component * bits / hidden)] for component in range(hidden)]


def sinusoidal(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    if config.frequencies == "vaswani":
        exponents = 2 * np.arange(math.ceil(hidden / 2)) / hidden
    else:
        exponents = np.linspace(0, 1, hidden // 2)
    angles = (position + config.offset) / config.base**exponents
    sines, cosines = np.sin(angles), np.cos(angles)
    if config.layout == "interleaved":
        vector = np.stack((sines, cosines), axis=-1).flatten()
    else:
        vector = np.concatenate((cosines, sines) if config.layout == "cosines_first" else (sines, cosines))
    # The last cosine of an odd width has no component left.
    filled: list[float] = (config.scale * np.append(vector, np.zeros(hidden))[:hidden]).tolist()
    return filled


def learned(config: Any, part: Any, hidden: int, position: int, length: int) -> list[float]:
    table = part.weight.tolist()
    if config.grid is not None:
        # Tokens that fill the grid row by row, after those with rows of their own.
        return table[position]
    rows = len(table) - config.offset
    if length <= rows:
        return table[position + config.offset]
    place = position * (rows - 1) / (length - 1)
    low = math.floor(place)
    below, above = (np.array(table[min(row, rows - 1) + config.offset]) for row in (low, low + 1))
    between: list[float] = (below + (above - below) * (place - low)).tolist()
    return between


def t5_bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """arXiv:1910.10683, section 2.1, and the fixtures of its released code."""
    offset = 0
    if bidirectional:
        num_buckets //= 2
        offset = num_buckets if distance > 0 else 0
        steps = abs(distance)
    else:
        steps = max(-distance, 0)
    exact = num_buckets // 2
    if steps < exact:
        return offset + steps
    ratio = math.log(steps / exact) / math.log(max_distance / exact)
    return offset + min(exact + int(ratio * (num_buckets - exact)), num_buckets - 1)


def t5(config: Any, part: Any, heads: int, causal: bool, head: int, distance: int) -> float:
    bidirectional = not causal if config.bidirectional is None else config.bidirectional
    bucket = t5_bucket(distance, config.num_buckets, config.max_distance, bidirectional)
    return part.weight[bucket, head].item()


def alibi_slope(heads: int, head: int) -> float:
    """arXiv:2108.12409, section 3: a geometric sequence that starts at, and has the ratio, 2**(-8 / heads)."""
    if heads & (heads - 1) == 0:
        return 2 ** (-8 / heads) ** 1 * (2 ** (-8 / heads)) ** head
    lower = 1
    while 2 * lower <= heads:
        lower *= 2
    if head < lower:
        return alibi_slope(lower, head)
    return alibi_slope(2 * lower, 2 * (head - lower))


def alibi(config: Any, part: Any, heads: int, causal: bool, head: int, distance: int) -> float:
    if config.variant != "asymmetric":
        return -alibi_slope(heads, head) * abs(distance)
    left = math.ceil(heads / 2)
    looks_left = head < left
    if (looks_left and distance > 0) or (not looks_left and distance < 0):
        return -10000.0
    slope = alibi_slope(left, head) if looks_left else alibi_slope(heads - left, head - left)
    return -slope * abs(distance)


def rotate(vector: list[float], frequencies: Any, layout: str, position: float, factor: float) -> list[float]:
    """arXiv:2104.09864, eq. 15: the block-diagonal matrix of rotations, pair by pair."""
    rotated = list(vector)
    for pair, frequency in enumerate(frequencies):
        first, second = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + len(frequencies))
        angle = -position * frequency if layout == "half_reversed" else position * frequency
        cosine, sine = math.cos(angle), math.sin(angle)
        rotated[first] = factor * (vector[first] * cosine - vector[second] * sine)
        rotated[second] = factor * (vector[first] * sine + vector[second] * cosine)
    return rotated


def rope_spectrum(theta: float, width: int) -> np.ndarray:
    return theta ** (-2 * np.arange(width // 2) / width)


def rope(config: Any, head_dim: int, vector: list[float], position: int, length: int) -> list[float]:
    width = config.rotary_dim or head_dim
    if config.partial_rotary_factor is not None:
        width = 2 * math.floor(config.partial_rotary_factor * head_dim / 2)
    frequencies, factor = config.inverse_frequencies, 1.0
    if frequencies is None:
        frequencies, factor = scaled_spectrum(config.scaling, config.theta, width, length)
    factor = config.attention_scaling or factor
    return rotate(vector, frequencies, config.layout, position, factor)


def p_rope(config: Any, head_dim: int, vector: list[float], position: int, length: int) -> list[float]:
    """arXiv:2410.06205, section 6."""
    width = config.rotary_dim or head_dim
    frequencies = rope_spectrum(config.theta, width)
    frequencies[math.floor(config.fraction * width / 2) :] = 0.0
    return rotate(vector, frequencies, config.layout, position, 1.0)


def scaled_spectrum(scaling: Any, theta: float, width: int, length: int) -> tuple[np.ndarray, float]:
    plain = rope_spectrum(theta, width)
    if scaling is None:
        return plain, 1.0
    match scaling.type:
        case "linear":
            return plain / scaling.factor, 1.0
        case "ntk":
            base = theta * scaling.factor ** (width / (width - 2))
            return rope_spectrum(base, width), 1.0
        case "dynamic":
            ratio = max(length / scaling.original_max_positions, 1.0)
            base = theta * (scaling.factor * ratio - (scaling.factor - 1)) ** (width / (width - 2))
            return rope_spectrum(base, width), 1.0
        case "llama3":
            return by_parts(scaling, plain), 1.0
        case "longrope":
            factors = scaling.long_factor if length > scaling.original_max_positions else scaling.short_factor
            attention = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_positions))
            return plain / np.array(factors), attention
        case "yarn":
            return yarn(scaling, theta, width, scaling.factor), 0.1 * math.log(scaling.factor) + 1
        case "dynamic_yarn":
            stretch = max(length / scaling.original_max_positions, scaling.factor)
            return yarn(scaling, theta, width, stretch), 0.1 * math.log(stretch) + 1
        case "clipped":
            inner, attention = scaled_spectrum(scaling.scaling, theta, width, length)
            return clipped(scaling, plain, inner), attention
    raise NotImplementedError(scaling.type)


def by_parts(scaling: Any, frequencies: np.ndarray) -> np.ndarray:
    """NTK-by-parts, arXiv:2309.00071, eq. 13 and 14."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    alpha, beta = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - alpha) / (beta - alpha), 0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def clipped(scaling: Any, plain: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """The code of arXiv:2602.05258: half a cosine over the slowest pairs."""
    slow = scaling.pairs
    if slow is None:
        slow = int((2 * math.pi / plain > scaling.original_max_positions).sum())
    return inner * np.append(np.ones(len(inner) - slow), (1 + np.cos(np.linspace(0, math.pi, slow))) / 2)


def yarn(scaling: Any, theta: float, width: int, factor: float) -> np.ndarray:
    """The authors' code: the ramp runs over pair indices, between those that make beta_fast and beta_slow turns."""

    def pair_with(turns: float) -> float:
        # original * theta**(-2 pair / width) = 2 pi turns
        return width / 2 * math.log(scaling.original_max_positions / (2 * math.pi * turns), theta)

    start = max(math.floor(pair_with(scaling.beta_fast)), 0)
    end = min(math.ceil(pair_with(scaling.beta_slow)), width - 1)
    divided = np.clip((np.arange(width // 2) - start) / max(end - start, 0.001), 0, 1)
    plain = rope_spectrum(theta, width)
    return divided * plain / factor + (1 - divided) * plain


ROPE_VARIANTS = (
    RopeConfig(layout="half"),
    RopeConfig(theta=500_000.0, layout="interleaved"),
    RopeConfig(rotary_dim=8, layout="half"),
    RopeConfig(rotary_dim=12, layout="half_reversed"),
    RopeConfig(partial_rotary_factor=0.7, layout="interleaved"),
    RopeConfig(inverse_frequencies=(1.0, 0.5, 0.0), layout="half", attention_scaling=1.25),
    RopeConfig(scaling=LinearScaling(4.0), layout="half"),
    RopeConfig(scaling=NtkScaling(4.0), layout="interleaved"),
    RopeConfig(scaling=DynamicScaling(2.0, 20), layout="half"),
    RopeConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0), layout="half"),
    RopeConfig(
        scaling=LongRopeScaling(
            tuple(1.0 + 0.1 * pair for pair in range(8)), tuple(2.0 + pair for pair in range(8)), 20, factor=4.0
        ),
        layout="interleaved",
    ),
    RopeConfig(scaling=Llama3Scaling(8.0, original_max_positions=64), layout="half"),
    RopeConfig(scaling=DynamicYarnScaling(20, beta_fast=4.0), layout="half"),
    RopeConfig(scaling=ClippedScaling(original_max_positions=64), layout="interleaved"),
    RopeConfig(scaling=ClippedScaling(4, scaling=DynamicYarnScaling(20, beta_fast=4.0)), layout="half"),
)

ROWS: dict[str, Row] = {
    "none": Row(
        "none",
        None,
        (NoneConfig(),),
        marks="-.+.++..-..",
    ),
    "integer": Row(
        "additive",
        integer,
        (IntegerConfig(), IntegerConfig(0.1, "one_hot"), IntegerConfig(0.5, "learned")),
        marks="++---+..---",
    ),
    "normalized_integer": Row(
        "additive",
        normalized_integer,
        (
            NormalizedIntegerConfig(),
            NormalizedIntegerConfig(subtract_one=True, direction="one_hot"),
            NormalizedIntegerConfig(length=100, scale=2.0, direction="learned"),
        ),
        marks="+---++..---",
    ),
    "binary": Row(
        "additive",
        binary,
        (BinaryConfig(), BinaryConfig(bits=9, scale=0.1)),
        reach=(64, 512),
        marks="++---+..-++",
    ),
    "sinusoidal": Row(
        "additive",
        sinusoidal,
        (
            SinusoidalConfig(),
            SinusoidalConfig(layout="concatenated", scale=0.5),
            SinusoidalConfig(frequencies="tensor2tensor", layout="concatenated", offset=2),
            SinusoidalConfig(frequencies="tensor2tensor", layout="cosines_first", base=100.0),
        ),
        marks="++-+++..+++",
    ),
    "learned": Row(
        "additive",
        learned,
        (
            LearnedConfig(),
            LearnedConfig(num_positions=50, offset=2),
            LearnedConfig(16, 2, "interpolate"),
            LearnedConfig(grid=(7, 8), num_prefix_tokens=2, interpolation="bilinear", antialias=True),
        ),
        reach=(64, 50, None, 58),
        marks="++---+..-++",
    ),
    "t5": Row(
        "bias",
        t5,
        (T5Config(), T5Config(16, 20, bidirectional=True, shared=False)),
        marks="-++.++..-++",
        causal_marks="-++.++..-++",
    ),
    "alibi": Row(
        "bias",
        alibi,
        (AlibiConfig(), AlibiConfig("asymmetric"), AlibiConfig(learnable=True)),
        of_start=True,
        marks="+++.++..+--",
    ),
    "rope": Row(
        "map",
        rope,
        ROPE_VARIANTS,
        marks="++++++.++++",
    ),
    "p_rope": Row(
        "map",
        p_rope,
        (PRopeConfig(layout="half"), PRopeConfig(1e6, 0.25, 12, "interleaved")),
        marks="++++++.++++",
    ),
}

#: The engine was built on these: each goes through every build of architecture.
ROWS = {name: dataclasses.replace(row, everywhere=True) for name, row in ROWS.items()}
