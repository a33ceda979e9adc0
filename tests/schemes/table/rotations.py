"""Maps of queries and keys beyond RoPE: slow, plain Python written from the papers, with matrices of numpy."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from hf_posenc.schemes import DynamicScaling, LinearScaling, YarnScaling
from hf_posenc.schemes.rotary.fope import FopeConfig
from hf_posenc.schemes.rotary.hope import HopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceConfig
from hf_posenc.schemes.rotary.rope_pp import RopePpConfig
from hf_posenc.schemes.rotary.string import StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig

from .row import LogitCase, Logits, Row, array, dot
from .seeds import rope_spectrum, rotate, scaled_spectrum

#: What the model of the tests was built for.
MAX_POSITIONS = 64

Matrix = list[list[float]]


def layout_of(config: Any) -> str:
    return "half" if config.layout == "auto" else config.layout


def floored(config: Any, width: int) -> list[float]:
    """arXiv:2410.21216: a pair whose wavelength is longer than the training length does not turn."""
    length = config.training_length or MAX_POSITIONS
    return [w if 2 * math.pi / w <= length else 0.0 for w in rope_spectrum(config.theta, width)]


def hope(config: Any, head_dim: int, vector: list[float], position: int, length: int) -> list[float]:
    return rotate(vector, floored(config, config.rotary_dim or head_dim), layout_of(config), position, 1.0)


def resonance(config: Any, head_dim: int, vector: list[float], position: int, length: int) -> list[float]:
    """arXiv:2403.00071, section 4.1, with exact periods: positions count modulo the wavelength."""
    width = config.rotary_dim or head_dim
    frequencies, factor = scaled_spectrum(config.scaling, config.theta, width, length)
    wavelengths = [round(2 * math.pi / frequency) for frequency in frequencies]
    turned = [2 * math.pi * (position % wavelength) / wavelength for wavelength in wavelengths]
    return rotate(vector, turned, layout_of(config), 1, factor)


def pairs_of(config: Any, vectors: Any, width: int) -> np.ndarray:
    """`[head, token, pair]`: pairs of dimensions, which turn by products with numbers of length 1."""
    rotated = array(vectors)[..., :width]
    interleaved = layout_of(config) == "interleaved"
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else np.split(rotated, 2, axis=-1)
    return second + 1j * first if config.layout == "half_reversed" else first + 1j * second


def xpos(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2212.10554, eq. 13 and algorithm 1, as logits: one complex number per pair and distance."""
    width = config.rotary_dim or len(case.query[0][0])
    queries, keys = (pairs_of(config, vectors, width) for vectors in (case.query, case.key))
    frequencies = rope_spectrum(config.theta, width)
    zeta = (2 * np.arange(width // 2) / width + config.gamma) / (1 + config.gamma)

    def logit(head: int, i: int, j: int) -> float:
        if j > i:
            return 0.0
        steps = case.distance(i, j)
        turns = np.exp(1j * frequencies * steps) * zeta ** (steps / config.scale_base)
        turned = float((queries[head, i] * turns * keys[head, j].conj()).sum().real)
        return case.scaling * (turned + dot(case.query[head][i][width:], case.key[head][j][width:]))

    return case.logits(logit)


def rope_pp(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2512.07525: the real and the imaginary part of one sum of complex numbers."""
    width = config.rotary_dim or len(case.query[0][0])
    queries, keys = (pairs_of(config, vectors, width) for vectors in (case.query, case.key))
    frequencies = rope_spectrum(config.theta, width)

    def logit(head: int, i: int, j: int) -> float:
        first = head - head % 2
        turns = np.exp(1j * frequencies * case.distance(i, j))
        total = complex((queries[first, i] * keys[head, j].conj() * turns).sum())
        rest = dot(case.query[first][i][width:], case.key[head][j][width:])
        return case.scaling * ((total.imag if head % 2 else total.real) + rest)

    return case.logits(logit)


def pope(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2509.10534, eq. 5 to 8: a cosine of the distance per dimension."""
    deltas = np.clip(array(parts.query_key_map.delta), -2 * math.pi, 0)
    queries, keys = (np.log1p(np.exp(array(vectors))) for vectors in (case.query, case.key))
    width = len(case.query[0][0])
    frequencies = config.theta ** (-np.arange(width) / width)

    def logit(head: int, i: int, j: int) -> float:
        angles = case.distance(j, i) * frequencies + deltas[head * len(deltas) // len(case.query)]
        return case.scaling * float((queries[head, i] * keys[head, j] * np.cos(angles)).sum())

    return case.logits(logit)


def learned_rope(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2607.10134: RoPE with a factor on every frequency."""
    spectrum = rope_spectrum(config.theta, config.rotary_dim or len(case.query[0][0]))
    offsets = parts.query_key_map.log_offsets.tolist()
    per_head = offsets if config.sharing == "head" else [offsets]

    def turned(vector: list[float], head: int, token: int) -> list[float]:
        of_head = per_head[head * len(per_head) // len(case.query)]
        frequencies = [w * math.exp(offset) for w, offset in zip(spectrum, of_head, strict=True)]
        return rotate(vector, frequencies, layout_of(config), case.positions[token], 1.0)

    return case.mapped(turned)


def fope_coefficients(heads: int, kept: int, mixed: int, gain: float, seed: int) -> list[list[Matrix]]:
    """`[cosine or sine][head][from][to]`: Box and Muller's normal numbers, in this order."""
    uniform = random.Random(seed).random
    deviation = gain * math.sqrt(2 / (kept * mixed + mixed * heads))

    def normal() -> float:
        first, second = uniform(), uniform()
        return deviation * math.sqrt(-2 * math.log(1 - first)) * math.cos(2 * math.pi * second)

    return [[[[normal() for _ in range(mixed)] for _ in range(kept)] for _ in range(heads)] for _ in range(2)]


def fope(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2412.17739: identity plus normal numbers, every column with the sum 1 in the listing of appendix B."""
    width = config.rotary_dim or len(case.query[0][0])
    spectrum = floored(config, width)
    kept = sum(frequency > 0 for frequency in spectrum)
    key_heads = 3
    released = config.variant == "released"
    mixed = min(kept, width // 4) if released else kept
    mixes = np.array(fope_coefficients(key_heads, kept, mixed, config.gain, config.seed))
    mixes[:, :, np.arange(mixed) * -(-kept // mixed), np.arange(mixed)] += 1.0
    if not released:
        mixes /= mixes.sum(axis=2, keepdims=True)

    def turned(vector: list[float], head: int, token: int) -> list[float]:
        angles, series = np.array(spectrum) * case.positions[token], []
        for function, mix in zip((np.cos, np.sin), mixes[:, head * key_heads // len(case.query)], strict=True):
            series.append(np.ones(width // 2) if released else function(angles))
            series[-1][:mixed] = function(angles[:kept]) @ mix
        result = list(vector)
        for pair, (cosine, sine) in enumerate(zip(*(one.tolist() for one in series), strict=True)):
            first, second = (pair, pair + width // 2) if layout_of(config) == "half" else (2 * pair, 2 * pair + 1)
            result[first] = vector[first] * cosine - vector[second] * sine
            result[second] = vector[first] * sine + vector[second] * cosine
        return result

    return case.mapped(turned)


def exponential(skew: np.ndarray) -> np.ndarray:
    """By the eigenvectors of a skew-symmetric matrix, which i makes Hermitian."""
    values, vectors = np.linalg.eigh(1j * skew)
    return ((vectors * np.exp(-1j * values)) @ vectors.conj().T).real


def cayley(entries: list[float], width: int) -> np.ndarray:
    """arXiv:2502.02562, eq. 10, from the entries above the diagonal, row by row."""
    skew = np.zeros((width, width))
    skew[np.triu_indices(width, 1)] = entries
    skew -= skew.T
    return (np.eye(width) - skew) @ np.linalg.inv(np.eye(width) + skew)


def circulant(first_column: list[float]) -> np.ndarray:
    size = len(first_column)
    return np.array([[first_column[(i - j) % size] for j in range(size)] for i in range(size)])


def string(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2502.02562, section 3: the rotations themselves, as matrices."""
    part = parts.query_key_map
    width = config.rotary_dim or len(case.query[0][0])
    spectrum = rope_spectrum(config.theta, width)
    if config.variant == "circulant":
        # The start: l so that the eigenvalues 2 sum_m l[m] sin(2 pi k m / d) are RoPE's frequencies.
        half = range(1, width // 2)
        start = [2 / width * sum(spectrum[k - 1] * math.sin(2 * math.pi * k * m / width) for k in half) for m in half]
        generators = []
        for offsets in part.rotation.generator_offsets.tolist():
            entries = [a + b for a, b in zip(start, offsets, strict=True)]
            generators.append(circulant([0.0, *entries, 0.0, *(-entry for entry in reversed(entries))]))

        def turned(vector: list[float], head: int, token: int) -> list[float]:
            generator = generators[head * len(generators) // len(case.query)]
            return (exponential(case.positions[token] * generator) @ vector[:width]).tolist() + vector[width:]

        return case.mapped(turned)
    bases = [cayley(entries, width) for entries in part.skew.tolist()]
    offsets = [[0.0] * (width // 2)]
    if config.learned_frequencies:
        offsets = part.rotation.log_offsets.tolist() if config.per_head else [part.rotation.log_offsets.tolist()]

    def changed(vector: list[float], head: int, token: int) -> list[float]:
        basis = bases[head * len(bases) // len(case.query)]
        factors = offsets[head * len(offsets) // len(case.query)]
        frequencies = [w * math.exp(factor) for w, factor in zip(spectrum, factors, strict=True)]
        in_basis = (basis @ vector[:width]).tolist() + vector[width:]
        return rotate(in_basis, frequencies, layout_of(config), case.positions[token], 1.0)

    return case.mapped(changed)


ROWS: dict[str, Row] = {
    "xpos": Row(
        "logits",
        xpos,
        (
            XposConfig(),
            XposConfig(theta=500.0, gamma=1.0, scale_base=20.0, origin=30.0, rotary_dim=12, layout="half"),
        ),
        causal_only=True,
        everywhere=True,
        marks="++++++.-+++",
        reach=(32695, 2338),
    ),
    "pope": Row(
        "logits",
        pope,
        (PopeConfig(), PopeConfig(theta=100.0)),
        everywhere=True,
        marks="++++++.-+++",
    ),
    "rope_pp": Row(
        "logits",
        rope_pp,
        (
            RopePpConfig(),
            RopePpConfig(theta=100.0, rotary_dim=12, layout="interleaved"),
            RopePpConfig(theta=50.0, layout="half_reversed"),
        ),
        marks="++++++.--++",
    ),
    "string": Row(
        "logits",
        string,
        (
            # Where training starts they are RoPE: another theta makes them differ from an architecture's own.
            StringConfig(theta=100.0),
            StringConfig(per_head=False, learned_frequencies=False, rotary_dim=12, layout="interleaved"),
            StringConfig(per_head=False),
            StringConfig("circulant"),
            StringConfig("circulant", per_head=False, rotary_dim=8),
        ),
        everywhere=True,
        marks="++++++.++++",
    ),
    "learned_rope": Row(
        "logits",
        learned_rope,
        (
            LearnedRopeConfig(theta=100.0),
            LearnedRopeConfig(sharing="layer", layout="interleaved"),
            LearnedRopeConfig(sharing="head", rotary_dim=8, layout="half"),
        ),
        marks="++++++.+-++",
    ),
    "hope": Row(
        "map",
        hope,
        # In 16 positions the second pair completes half a turn, but not a whole one.
        (HopeConfig(), HopeConfig(theta=500.0, training_length=16, rotary_dim=12, layout="interleaved")),
        marks="++++++.++++",
    ),
    "fope": Row(
        "logits",
        fope,
        (
            FopeConfig(),
            FopeConfig(theta=500.0, training_length=20, gain=0.6, seed=7, rotary_dim=12, layout="interleaved"),
            FopeConfig(learnable=True),
            FopeConfig(variant="released", training_length=20),
        ),
        of_start=True,
        marks="++--++.-+++",
    ),
    "resonance": Row(
        "map",
        resonance,
        (
            ResonanceConfig(),
            ResonanceConfig(theta=500.0, rotary_dim=12, layout="interleaved", scaling=LinearScaling(4.0)),
            ResonanceConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0)),
            ResonanceConfig(scaling=DynamicScaling(2.0, 20)),
        ),
        marks="++++++.++++",
    ),
}
