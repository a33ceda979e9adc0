"""What is added or mapped, dimension by dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import POSITION_LABEL, FigureKind, color_scale, heat, legend_below, panels
from hf_posenc.plots.schemes.probes import added_vectors, mapped_vectors, random_query
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Positions of a heat map, and of single dimensions; how many of these are drawn.
_LENGTH, _LINE, _LINES = 100, 128, 6
#: Where one token is compared, and how many dimensions are drawn of it.
_PLACES, _SHOWN = (0, 50, 99), 64


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


def _has_vectors(subject: Subject) -> bool:
    return subject.parts.additive is not None or subject.parts.query_key_map is not None


class HeatMap(FigureKind):
    """Position x dimension: what is added, or the cosines and sines of a rotation."""

    name = "heat_map"
    summary = "position x dimension: added vectors, or the phases of a rotation"

    def applies(self, subject: Subject) -> bool:
        """Whether something is added or mapped."""
        return _has_vectors(subject)

    def draw(self, subject: Subject) -> Figure:
        """A heat map for each matrix."""
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

    def caption(self, subject: Subject) -> str:
        """With what the matrices are."""
        _, words = encoded_dimensions(subject, 2)
        return f"Position x dimension: {words}, for the first {_LENGTH} positions."


class Dimensions(FigureKind):
    """Single dimensions over position."""

    name = "dimensions"
    summary = "single dimensions over position"

    def applies(self, subject: Subject) -> bool:
        """Whether something is added or mapped."""
        return _has_vectors(subject)

    def draw(self, subject: Subject) -> Figure:
        """Six dimensions, one below the other."""
        matrices, _ = encoded_dimensions(subject, _LINE)
        figure, axes = panels(subject.title, _LINES, 1, 6.4, 0.72, sharex=True, sharey=True)
        dashes = ("solid", (0, (4, 2)))
        # The second half of most layouts repeats the frequencies of the first.
        width = matrices[0][1].shape[1] // len(matrices)
        # Closer together at the start, where most schemes have what changes within a few positions.
        shown = [round((index / (_LINES - 1)) ** 1.5 * (width - 1)) for index in range(_LINES)]
        for panel, dimension in zip(axes, shown, strict=True):
            for index, (name, matrix) in enumerate(matrices):
                panel.plot(matrix[:, dimension].numpy(), color=COLORS[index], linestyle=dashes[index], label=name)
            panel.text(1.01, 0.5, f"dimension {dimension}", transform=panel.transAxes, va="center", fontsize=9)
            panel.margins(x=0.01, y=0.15)
        axes[-1].set_xlabel(POSITION_LABEL)
        figure.supylabel("value", fontsize=10)
        if len(matrices) > 1:
            legend_below(figure, axes[0])
        return figure

    def caption(self, subject: Subject) -> str:
        """With what the values are."""
        _, words = encoded_dimensions(subject, 2)
        return f"Single dimensions over {_LINE} positions: {words}."


def _vectors(subject: Subject) -> Tensor:
    """`(3, dimensions)`: the same token at each of the places."""
    length = _PLACES[-1] + 1
    if subject.parts.additive is not None:
        vectors = added_vectors(subject, length)
        token = torch.randn(vectors.shape[1], generator=torch.Generator().manual_seed(INPUT_SEED))
        return (token + vectors)[list(_PLACES)]
    return mapped_vectors(subject, random_query(subject), length)[list(_PLACES)]


class Difference(FigureKind):
    """One token at three positions: what the encoding changes about its vector."""

    name = "difference"
    summary = "one encoded vector at positions 0, 50 and 99, and the differences"

    def applies(self, subject: Subject) -> bool:
        """Whether something is added or mapped."""
        return _has_vectors(subject)

    def draw(self, subject: Subject) -> Figure:
        """The vectors above, their differences below."""
        vectors = _vectors(subject)
        figure, (above, below) = panels(subject.title, 2, 1, 6.6, 1.9, sharex=True)
        dimension = torch.arange(min(_SHOWN, vectors.shape[1])).numpy()
        markers = "osD"
        for index, (place, vector) in enumerate(zip(_PLACES, vectors, strict=True)):
            look: dict[str, Any] = {"color": COLORS[index], "marker": markers[index], "markersize": 3, "linewidth": 1.1}
            above.plot(dimension, vector[:_SHOWN].numpy(), label=f"at position {place}", **look)
            if place:
                change = vector - vectors[0]
                size = float(change.norm() / vectors[0].norm())
                label = f"{place} less 0: {size:.2g} of its length"
                below.plot(dimension, change[:_SHOWN].numpy(), label=label, **look)
        above.set_ylabel("component")
        below.set_ylabel("difference")
        below.set_xlabel(f"dimension (first {len(dimension)} of {vectors.shape[1]})")
        below.axhline(0, color="0.6", linewidth=0.8)
        for axes in (above, below):
            axes.margins(x=0.01)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 0.98), ncols=3, frameon=False, borderaxespad=0.1)
        return figure

    def caption(self, subject: Subject) -> str:
        """With the places."""
        what = "token embedding plus the added vector" if subject.parts.additive is not None else "query after the map"
        places = ", ".join(str(place) for place in _PLACES[:-1])
        return (
            f"One random {what}, at positions {places} and {_PLACES[-1]}, and how far the later ones are from the "
            f"first (standard normal before encoding, seed {INPUT_SEED})."
        )
