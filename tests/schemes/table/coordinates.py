"""Rotations over several axes, one pair at a time."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from hf_posenc.schemes.rotary.mrope import MRopeConfig
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig

from . import seeds
from .row import KEY_VALUE_HEADS, LogitCase, Logits, Row


def place(position: int, grid: tuple[int, ...], prefix: int) -> list[int]:
    """Row-major: the last axis counts to its size, then the one before it goes one further."""
    left = max(position - prefix, 0)
    coordinates = []
    for size in grid[::-1]:
        coordinates.insert(0, left % size)
        left //= size
    return [left, *coordinates]


def shares(pairs: int, axes: int) -> list[int]:
    """How many pairs each axis owns: evenly dealt, one after the other."""
    owned = [0] * axes
    for pair in range(pairs):
        owned[pair % axes] += 1
    return owned


def spectrum(config: Any, part: Any, head: int, width: int, axes: int) -> np.ndarray:
    """`[axis][pair]`: radians per step, arXiv:2403.13298."""
    pairs = width // 2
    if config.assignment == "mixed":
        heads = part.frequencies.shape[1]
        return np.array(part.frequencies[:, head if heads > 1 else 0].tolist())
    theta = config.theta or 100.0
    if config.assignment == "golden":
        first = (head if config.per_head else 0) * pairs
        directions = np.array([golden_direction(first + pair, axes) for pair in range(pairs)])
        return directions.T * theta ** (-np.arange(pairs) / pairs)
    table = np.zeros((axes, pairs))
    column = 0
    for axis, owned in enumerate(shares(pairs, axes)):
        for rank in range(owned):
            dealt = rank * axes + axis
            match config.assignment:
                case "block":
                    table[axis, column] = theta ** (-rank / owned)
                case "alternating":
                    table[axis, dealt] = theta ** (-rank / owned)
                case "split":
                    table[axis, column] = theta ** (-2 * dealt / width)
                case "interleaved":
                    table[axis, dealt] = theta ** (-2 * dealt / width)
            column += 1
    return table


def golden_direction(number: int, axes: int) -> list[float]:
    """jerryxio.ng/posts/nd-rope: in the plane by the golden angle, in space by the generalised golden ratio."""
    if axes == 2:
        angle = number * math.pi * (3 - math.sqrt(5))
        return [math.cos(angle), math.sin(angle)]
    low, high = 1.0, 2.0
    for _ in range(60):
        ratio = (low + high) / 2
        low, high = (ratio, high) if ratio ** (axes + 1) < ratio + 1 else (low, ratio)
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((number + 1) * low**-power % 1) for power in range(1, axes + 1)]
    return [quantile / math.hypot(*quantiles) for quantile in quantiles]


def read(config: Any, position: int, length: int) -> list[float]:
    """The coordinates that turn the pairs of a token, in the order of the axes of the spectrum."""
    place_of = place(position, config.grid, config.num_prefix_tokens)
    if position < config.num_prefix_tokens:
        return [0.0] * len(place_of)
    coordinates = [float(coordinate + config.origin) for coordinate in place_of]
    if config.coordinates == "normalized":
        row = math.prod(config.grid)
        size = [math.ceil((length - config.num_prefix_tokens) / row), *config.grid]
        coordinates = [
            2 * math.pi * (2 * (coordinate + 0.5) / count - 1) for coordinate, count in zip(place_of, size, strict=True)
        ]
    return coordinates[::-1] if config.columns_first else coordinates


def rope_nd(config: Any, parts: Any, case: LogitCase) -> Logits:
    part = parts.query_key_map
    width = config.rotary_dim or len(case.query[0][0])
    axes = len(config.grid) + 1
    groups = len(case.query) // KEY_VALUE_HEADS

    def turned(vector: list[float], head: int, token: int) -> list[float]:
        at = read(config, case.positions[token], max(case.positions) + 1)
        angles = at @ spectrum(config, part, head // groups, width, axes)
        return seeds.rotate(vector, angles, config.layout, 1, 1.0)

    return case.mapped(turned)


def mrope(config: Any, head_dim: int, vector: list[float], position: int, length: int) -> list[float]:
    """Text: time, height and width agree, and nothing but RoPE is left (arXiv:2409.12191, section 2.1)."""
    width = config.rotary_dim or head_dim
    return seeds.rotate(vector, seeds.rope_spectrum(config.theta, width), config.layout, position, 1.0)


ROWS: dict[str, Row] = {
    "rope_nd": Row(
        "logits",
        rope_nd,
        (
            RopeNdConfig(grid=(4,), layout="half"),
            RopeNdConfig(10_000.0, (5,), "split", layout="interleaved"),
            RopeNdConfig(50.0, (3, 4), "interleaved", rotary_dim=14, layout="half"),
            RopeNdConfig(grid=(2, 3), num_prefix_tokens=2, layout="half_reversed"),
            RopeNdConfig(None, (6,), "mixed", layout="half"),
            RopeNdConfig(None, (4, 4), "mixed", per_head=False, rotary_dim=8, layout="interleaved"),
            RopeNdConfig(grid=(5,), assignment="golden", layout="half"),
            RopeNdConfig(grid=(3, 4), assignment="golden", per_head=False, layout="interleaved"),
            RopeNdConfig(grid=(5,), assignment="alternating", layout="half", num_prefix_tokens=1, origin=1),
            RopeNdConfig(grid=(8,), layout="half", coordinates="normalized", columns_first=True),
        ),
        marks="++--+++++++",
    ),
    "mrope": Row(
        "map",
        mrope,
        (
            MRopeConfig(layout="half"),
            MRopeConfig(10_000.0, (3, 2, 1), rotary_dim=12, layout="interleaved"),
            MRopeConfig(500_000.0, interleaved=True, layout="half", spatial_reset=True),
        ),
        everywhere=True,
        marks="+++++++++++",
    ),
}
