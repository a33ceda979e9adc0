"""The frequencies of rotations over several axes: axial ones, and even directions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies


def axial_frequencies(theta: float, rotary_dim: int, axes: int, assignment: str) -> Tensor:
    """Returns `(axes, rotary_dim / 2)` float32 with one nonzero entry per column.

    Args:
        theta: the base.
        rotary_dim: number of rotated dimensions.
        axes: number of axes, at most the number of pairs.
        assignment: "block", "split", "interleaved" or "alternating", as in `RopeNdConfig`.
    """
    pairs = rotary_dim // 2
    owned = [torch.arange(axis, pairs, axes, device="cpu") for axis in range(axes)]
    frequencies = torch.zeros(axes, pairs, dtype=torch.float32, device="cpu")
    spectrum = rope_inverse_frequencies(theta, rotary_dim)
    start = 0
    for axis, columns in enumerate(owned):
        place = slice(start, start + len(columns)) if assignment in ("block", "split") else columns
        full_spectrum = assignment in ("block", "alternating")
        frequencies[axis, place] = (
            rope_inverse_frequencies(theta, 2 * len(columns)) if full_spectrum else spectrum[columns]
        )
        start += len(columns)
    return frequencies


def golden_frequencies(theta: float, rotary_dim: int, axes: int, heads: int) -> Tensor:
    """Returns `(axes, heads, rotary_dim / 2)` float32, without the axis of heads if there is one head.

    Args:
        theta: the base.
        rotary_dim: number of rotated dimensions.
        axes: number of axes, 2 or 3.
        heads: number of key heads with their own directions.
    """
    pairs = rotary_dim // 2
    count = torch.arange(heads * pairs, dtype=torch.float64, device="cpu")
    if axes == 2:
        turns = count * (math.pi * (3 - math.sqrt(5)))
        directions = torch.stack((turns.cos(), turns.sin()))
    else:
        ratio = 1.0
        for _ in range(100):
            ratio = (1 + ratio) ** (1 / (axes + 1))
        steps = ratio ** -torch.arange(1, axes + 1, dtype=torch.float64, device="cpu")
        quantiles = torch.erfinv(2 * ((count + 1) * steps.unsqueeze(-1) % 1) - 1)
        directions = quantiles / quantiles.norm(dim=0)
    spectrum = rope_inverse_frequencies(theta, rotary_dim)
    frequencies = directions.view(axes, heads, pairs).float() * spectrum
    return frequencies if heads > 1 else frequencies.squeeze(1)


def random_rotation(axes: int) -> Tensor:
    """Draws a uniformly random rotation matrix, `(axes, axes)` float32 on the CPU."""
    if axes == 2:
        angle = float(torch.rand((), dtype=torch.float32, device="cpu")) * 2 * math.pi
        rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        return torch.tensor(rows, dtype=torch.float32, device="cpu")
    orthogonal, triangular = torch.linalg.qr(torch.randn(axes, axes, dtype=torch.float32, device="cpu"))
    orthogonal = orthogonal * triangular.diagonal().sign()
    orthogonal[:, 0] *= torch.linalg.det(orthogonal).sign()
    return orthogonal
