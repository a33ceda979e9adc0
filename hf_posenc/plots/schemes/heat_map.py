"""Position x dimension: what is added, or the cosines and sines of a rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import POSITION_LABEL, color_scale, heat, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import added_vectors, mapped_vectors
from hf_posenc.plots.schemes.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 100


def encoded_dimensions(subject: Subject, length: int) -> tuple[list[tuple[str, Tensor]], str]:
    """What stands at each position: named matrices `(length, dimensions)`, and in words what they are.

    The vectors of an additive encoding; else the cosine and sine of a rotation; else, for any other map, a query of
    ones after the map.
    """
    if subject.parts.additive is not None:
        return [("added vector", added_vectors(subject, length))], "the vectors added to the token embeddings"
    waves = _cosine_and_sine(subject, length)
    if waves is not None:
        return [("cosine", waves[0]), ("sine", waves[1])], "the cosine and sine that each dimension of a head meets"
    ones = torch.ones(subject.context.head_dim)
    return [("mapped query of ones", mapped_vectors(subject, ones, length))], "a query of ones, mapped at each position"


def _cosine_and_sine(subject: Subject, length: int) -> tuple[Tensor, Tensor] | None:
    """The two phases of a map, each `(length, dimensions)`, if they are a cosine and a sine."""
    part = subject.parts.query_key_map
    assert part is not None
    with torch.no_grad():
        phases = part.phases(subject.positions(length))
    if len(phases) != 2 or phases[0].ndim not in (3, 4) or phases[0].shape != phases[1].shape:
        return None
    # With an axis of heads, the first of them.
    cosine, sine = ((phase[0] if phase.ndim == 3 else phase[0, :, 0]).float() for phase in phases)
    radius = cosine.square() + sine.square()
    at_zero = (cosine[0] > 0).all() and sine[0].abs().max() < 1e-6
    steady = torch.allclose(radius, radius[:1].expand_as(radius), rtol=1e-4, atol=1e-6)
    return (cosine, sine) if bool(at_zero) and steady else None


def _applies(subject: Subject) -> bool:
    return subject.parts.additive is not None or subject.parts.query_key_map is not None


def _draw(subject: Subject) -> Figure:
    matrices, _ = encoded_dimensions(subject, _LENGTH)
    figure, axes = panels(subject.title, 1, len(matrices), 5.8 if len(matrices) == 1 else 4.1, 3.3, sharey=True)
    scale = color_scale(torch.cat([matrix for _, matrix in matrices]))
    images = [heat(panel, matrix.T, scale) for panel, (_, matrix) in zip(axes, matrices, strict=True)]
    for panel, (name, _) in zip(axes, matrices, strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(POSITION_LABEL)
    axes[0].set_ylabel("dimension" if subject.parts.additive is not None else "dimension of a head")
    figure.colorbar(images[0], ax=axes, label="value", pad=0.01)
    return figure


def _caption(subject: Subject) -> str:
    _, words = encoded_dimensions(subject, 2)
    return f"Position x dimension: {words}, for the first {_LENGTH} positions."


KIND = FigureKind(
    "heat_map", "position x dimension: added vectors, or the phases of a rotation", _applies, _draw, _caption
)
