"""Do logits fall with distance?"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.metrics.properties.specimen import Found, Refusals, Specimen, build_specimen, measured, positions_at
from hf_posenc.metrics.statistics import spearman
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.rotary.rope import RotaryMap

#: At or below this rank correlation with distance, logits fall overall. They may oscillate.
DECAYS_BELOW = -0.5
_ENVELOPE_DISTANCES = (0, 1, 10, 100, 1000, 4000)
#: Number of distances, and those that details show.
_LENGTH, _SHOWN = 256, (0, 1, 2, 4, 8, 16, 32, 64, 128, 255)


@measured(DECAYS_BELOW)
def long_term_decay(specimen: Specimen, refusals: Refusals) -> Found | None:
    """Measures the rank correlation (Spearman) of distance and logit, for equal queries and keys at 256 distances.

    The curve is `decay_curve`. A scheme with learned weights is measured with three draws of them, and the weakest
    decay counts, because an accidental trend of a random table is not a property of the mechanism. Passes at or below
    -0.5; a curve without variation has the correlation 0.

    `details["half"]` is the first distance with less than half the logit of distance 0 (`None` if there is none), and
    `details["at"]` the curve at some distances. For rotations by position times frequency that all heads share,
    `details["envelope"]` is RoFormer's mean of `|S_i|` by distance (`envelope`).
    """
    specimens = [specimen]
    if any(True for part in specimen.parts for _ in part.parameters()):
        specimens += [build_specimen(specimen.config, causal=specimen.causal, seed=seed) for seed in (1, 2)]
    curves = []
    with refusals.at(f"positions up to {_total(_LENGTH) - 1}"):
        curves = [decay_curve(drawn, length=_LENGTH) for drawn in specimens]
    if refusals:
        return None
    distances = torch.arange(_LENGTH)
    value, curve = max(((spearman(distances, curve), curve) for curve in curves), key=lambda pair: pair[0])
    below = distances[curve < 0.5]
    details: dict[str, object] = {
        "half": int(below[0]) if below.numel() else None,
        "at": {distance: float(curve[distance]) for distance in _SHOWN},
    }
    frequencies = rotation_frequencies(specimen.parts, _LENGTH)
    if frequencies is not None:
        values = envelope(frequencies, torch.tensor(_ENVELOPE_DISTANCES)).tolist()
        details["envelope"] = dict(zip(_ENVELOPE_DISTANCES, values, strict=True))
    return value, details


@torch.no_grad()
def decay_curve(scheme: str | SchemeConfig | Specimen, *, length: int = 256, independent: bool = False) -> Tensor:
    """Returns `D(distance)`: the mean logit of a query and a key at this distance, in units of the content's logit.

    All tokens have the same content. The mean is over unit vectors, many queries, and keys on both sides if the scheme
    is bidirectional. For maps, the unit vectors are the 64 coordinate directions, spread over contents and heads, and
    their negatives, which for a rotation gives the exact mean over the sphere. Logits are not divided by the square
    root of the width, so that of the content is 1, and `D = 1 + logit(distance) - logit(0)`: for schemes that do
    nothing at distance 0 this is the ratio of the two.

    Args:
        scheme: a name, a config, or a built specimen.
        length: number of distances, from 0.
        independent: draws keys independently of the queries, from N(0, 1 / head_dim) per component, and returns the
            mean logit itself. For rotations it is 0 at every distance (arXiv:2410.06205, proposition 3.2): decay is a
            property of queries and keys that are similar.

    Returns:
        `(length,)` float64.
    """
    specimen = build_specimen(scheme)
    heads, head_dim = specimen.context.num_heads, specimen.context.head_dim
    total = _total(length)
    positions = positions_at(torch.arange(total))
    per_head = head_dim // heads
    # Without a map, all directions have the same dot product with themselves, so few are enough.
    vectors = torch.eye(head_dim)[: per_head if specimen.parts.query_key_map is not None else 2]
    contents = torch.cat((vectors, -vectors)).unsqueeze(1)
    hidden_states = (contents + specimen.additive(positions)).expand(-1, total, -1)
    # Head h reads the directions per_head * h, ...: the same permutation for queries and keys.
    query = torch.stack([hidden_states.roll(per_head * head, dims=-1) for head in range(heads)], dim=1)
    key = query
    if independent:
        generator = torch.Generator().manual_seed(0)
        key = torch.randn(query.shape[0], heads, 1, head_dim, generator=generator) * head_dim**-0.5
        key = key.expand(-1, -1, total, -1)
    queries = torch.arange(length - 1, total if specimen.causal else total - length + 1).unsqueeze(-1)
    distances = torch.arange(length)
    sums = torch.zeros(length, dtype=torch.float64)
    for q, k, x in zip(query.split(8), key.split(8), hidden_states.split(8), strict=True):
        logits = positional_logits(specimen.parts, q, k, positions, x, scaling=1.0)
        sides = [logits[:, :, queries, queries - distances]]
        sides += [] if specimen.causal else [logits[:, :, queries, queries + distances]]
        sums += sum(side.double().mean(dim=(1, 2)).sum(dim=0) for side in sides) / len(sides)
    by_distance = sums / query.shape[0]
    return by_distance if independent else 1 + by_distance - by_distance[0]


def envelope(inverse_frequencies: Tensor, distances: Tensor) -> Tensor:
    """Returns RoFormer's bound on the decay of a rotation (arXiv:2104.09864, section 3.4.3 and figure 2).

    It is the mean of `|S_i|` over all pairs `i`. `S_i` is the sum of the first `i` terms
    `exp(1j * distance * frequency_m)`.

    Returns `(distances,)` float64 for frequencies `(pairs,)` in radians per position.
    """
    angles = distances.double().unsqueeze(-1) * inverse_frequencies.double()
    return torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1).abs().mean(dim=-1)


@torch.no_grad()
def rotation_frequencies(parts: SchemeParts, length: int) -> Tensor | None:
    """Returns the frequencies `(pairs,)` of a scheme that only rotates, with the same ones in all heads; else `None`.

    A map that also changes lengths of pairs has no such bound on its decay, nor does a map together with a bias.
    """
    part = parts.query_key_map
    if not isinstance(part, RotaryMap) or not part.symmetric or parts.logit_bias is not None:
        return None
    cosine, sine = part.phases(positions_at(torch.arange(length)))
    squares = cosine.square() + sine.square()
    frequencies = part.inverse_frequencies(torch.tensor([[length]])).flatten()
    if frequencies.numel() != part.rotary_dim // 2 or not torch.allclose(squares, squares[:, :1].expand_as(squares)):
        return None
    return frequencies


def _total(length: int) -> int:
    """Returns a sequence length with some queries in the middle that have `length - 1` tokens on either side."""
    return 2 * length + 64
