"""Pairs of dimensions of one query, turning with position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import chosen, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import mapped_vectors, random_query
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import SEQUENTIAL_MAP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 256
_SHOWN_POSITIONS = 16
_PANELS = 4
#: How far the logarithm of a pair's squared length may be from a straight line over position.
_STEADY = 1e-3


def turning_pairs(subject: Subject) -> list[tuple[int, int]]:
    """The pairs of dimensions that turn as position grows, found from what the map does to one random query.

    A pair turns if its length is constant, or grows or shrinks exponentially, while its components change. The partner
    of a dimension is the one with which this holds best.
    """
    vectors = mapped_vectors(subject, random_query(subject), _LENGTH).double()
    width = vectors.shape[1]
    moving = (vectors - vectors[0]).abs().amax(0) > 1e-4 * vectors.abs().amax(0)
    squares = vectors.square()
    logarithms = (squares.unsqueeze(2) + squares.unsqueeze(1)).clamp(min=1e-12).log()
    time = torch.linspace(-1, 1, _LENGTH, dtype=torch.float64)
    slope = torch.einsum("t,tab->ab", time, logarithms) / time.square().sum()
    spread = (logarithms - logarithms.mean(0) - time[:, None, None] * slope).abs().amax(0)
    spread[torch.arange(width), torch.arange(width)] = torch.inf
    spread[:, ~moving] = torch.inf
    partner = spread.argmin(1).tolist()
    return [
        (first, second)
        for first, second in enumerate(partner)
        if first < second and moving[first] and partner[second] == first and spread[first, second] < _STEADY
    ]


def _speed(pair: Tensor) -> float:
    """Radians per position of `(length, 2)`: the median of its first steps that turn at all."""
    angles = torch.atan2(pair[:, 1], pair[:, 0])
    step = angles.diff()[:_SHOWN_POSITIONS]
    step = torch.atan2(step.sin(), step.cos())
    turning = step[step.abs() > 1e-7]
    return float(turning.median()) if turning.numel() else 0.0


def _applies(subject: Subject) -> bool:
    return subject.parts.query_key_map is not None and len(turning_pairs(subject)) > 1


def _draw(subject: Subject) -> Figure:
    vectors = mapped_vectors(subject, random_query(subject), _LENGTH)
    pairs = sorted(turning_pairs(subject), key=lambda pair: -abs(_speed(vectors[:, list(pair)])))
    shown = [pairs[index] for index in chosen(len(pairs), _PANELS)]
    figure, axes = panels(subject.title, 1, len(shown), 2.35, 2.75, sharex=True, sharey=True)
    steps = torch.arange(_SHOWN_POSITIONS).numpy()
    for panel, pair in zip(axes, shown, strict=True):
        turning = vectors[:, list(pair)]
        turning = turning / turning[0].norm()
        circle = torch.linspace(0, 2 * torch.pi, 100)
        panel.plot(circle.cos().numpy(), circle.sin().numpy(), color="0.8", linewidth=0.8, zorder=1)
        first, last = turning[:_SHOWN_POSITIONS].T.numpy()
        for x, y in zip(first.tolist(), last.tolist(), strict=True):
            panel.plot([0, x], [0, y], color="0.75", linewidth=0.6, zorder=1)
        points = panel.scatter(first, last, c=steps, cmap=SEQUENTIAL_MAP, s=26, zorder=3, edgecolors="none")
        panel.scatter(first[:1], last[:1], s=70, facecolors="none", edgecolors="#D55E00", linewidths=1.4, zorder=4)
        panel.set_aspect("equal")
        reach = max(1.25, float(turning[:_SHOWN_POSITIONS].norm(dim=1).max()) * 1.1)
        panel.set_xlim(-reach, reach)
        panel.set_ylim(-reach, reach)
        speed = abs(_speed(vectors[:, list(pair)]))
        panel.set_title(f"dimensions {pair[0]} and {pair[1]}\n{speed:.2g} rad per position", fontsize=9)
        panel.set_xticks([-1, 0, 1])
        panel.set_yticks([-1, 0, 1])
    colorbar = figure.colorbar(points, ax=axes, label="position", pad=0.01, shrink=0.8)
    colorbar.set_ticks([0.0, 5.0, 10.0, 15.0])
    return figure


def _caption(subject: Subject) -> str:
    return (
        f"Pairs of dimensions of one random query (seed {INPUT_SEED}) at positions 0 to {_SHOWN_POSITIONS - 1}, from "
        "the fastest to the slowest pair; each pair is drawn with length 1, and a ring marks position 0."
    )


KIND = FigureKind("rotation", "pairs of dimensions of one query, turning with position", _applies, _draw, _caption)
