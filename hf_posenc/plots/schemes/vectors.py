"""Figures of added vectors and mapped queries, by dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.metrics.properties.decay import rotation_frequencies
from hf_posenc.plots.schemes.drawing import POSITION_LABEL, color_scale, figure_kind, legend_below, map_figure, panels
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject, added_vectors, mapped_vectors, random_query
from hf_posenc.plots.style import palette, shade

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Number of positions in a heat map and in plots of single dimensions, and how many dimensions are drawn.
_LENGTH, _LINE, _LINES = 100, 128, 6
#: Positions at which one token is compared.
_PLACES = (0, 50, 99)


def encoded_dimensions(subject: Subject, length: int) -> dict[str, Tensor]:
    """Returns the encoding of each position as named matrices `(length, dimensions)`."""
    part = subject.parts.query_key_map
    if subject.parts.additive is not None:
        return {"added vector": added_vectors(subject, length)}
    assert part is not None
    if rotation_frequencies(subject.parts, length) is not None:
        cosine, sine = part.phases(subject.positions(length))
        return {"cosine": cosine[0].float(), "sine": sine[0].float()}
    return {"mapped query of ones": mapped_vectors(subject, torch.ones(subject.context.head_dim), length)}


def _described(subject: Subject) -> str:
    if subject.parts.additive is not None:
        return "the vectors added to the token embeddings"
    if rotation_frequencies(subject.parts, _LENGTH) is not None:
        return "the cosine and sine by which each dimension of a head is rotated"
    return "a query of ones after the map"


def _has_vectors(subject: Subject) -> bool:
    return subject.parts.additive is not None or subject.parts.query_key_map is not None


@figure_kind(
    _has_vectors,
    lambda subject: (
        f"For the first {_LENGTH} positions: {_described(subject)}. There is one column per position and one row per "
        "dimension. Two positions with different columns can be distinguished."
    ),
)
def heat_map(subject: Subject) -> Figure:
    """Position x dimension: added vectors, or the phases of a rotation."""
    maps = {name: matrix.T for name, matrix in encoded_dimensions(subject, _LENGTH).items()}
    figure, axes = map_figure(subject, maps, "value", 3.4)
    for panel in axes:
        panel.set_xlabel(POSITION_LABEL)
    axes[0].set_ylabel("dimension" if subject.parts.additive is not None else "dimension of a head")
    return figure


@figure_kind(
    _has_vectors,
    lambda subject: (
        f"A few dimensions over {_LINE} positions: {_described(subject)}. All panels have the same axes, so the "
        "speeds of the dimensions can be compared."
    ),
)
def dimensions(subject: Subject) -> Figure:
    """Single dimensions over position."""
    # Six dimensions, one below the other.
    matrices = encoded_dimensions(subject, _LINE)
    figure, axes = panels(subject.title, _LINES, 1, 0.72, sharex=True, sharey=True)
    # The second half of most layouts repeats the frequencies of the first.
    width = next(iter(matrices.values())).shape[1] // len(matrices)
    for row, panel in enumerate(axes):
        # Closer together at the start, where most schemes have the dimensions that change within a few positions.
        dimension = round((row / (_LINES - 1)) ** 1.5 * (width - 1))
        for index, (name, matrix) in enumerate(matrices.items()):
            panel.plot(matrix[:, dimension].numpy(), color=palette()[index], linestyle=("-", "--")[index], label=name)
        panel.text(1.01, 0.5, f"dimension {dimension}", transform=panel.transAxes, va="center", fontsize=9)
        panel.margins(x=0.01, y=0.15)
    axes[-1].set_xlabel(POSITION_LABEL)
    figure.supylabel("value", fontsize=10)
    legend_below(figure, axes[0])
    return figure


@figure_kind(
    _has_vectors,
    lambda subject: (
        f"One random {'token embedding with the added vector' if subject.parts.additive else 'query after the map'} "
        f"(standard normal, seed {INPUT_SEED}) at positions {', '.join(map(str, _PLACES))}, and below each the "
        f"change since position {_PLACES[0]}. Pale dimensions in the lower strips do not change."
    ),
)
def difference(subject: Subject) -> Figure:
    """One vector at positions 0, 50 and 99, and what changes."""
    # A strip of colours per place of the same token, and one per difference.
    length = _PLACES[-1] + 1
    if subject.parts.additive is not None:
        added = added_vectors(subject, length)
        vectors = added + torch.randn(added.shape[1], generator=torch.Generator().manual_seed(INPUT_SEED))
    else:
        vectors = mapped_vectors(subject, random_query(subject), length)
    first, *later = _PLACES
    changes = {place: vectors[place] - vectors[first] for place in later}
    rows = {f"at position {place}": vectors[place] for place in _PLACES}
    rows |= {f"change by position {place}": change for place, change in changes.items()}
    strips = torch.stack(list(rows.values()))
    figure, (axes,) = panels(subject.title, 1, 1, 2.4)
    image = axes.imshow(strips.numpy(), aspect="auto", interpolation="nearest", **color_scale(strips))
    axes.set_yticks(range(len(rows)), list(rows))
    for row in range(1, len(rows)):
        axes.axhline(row - 0.5, color=shade(0), linewidth=8 if row == len(_PLACES) else 2)
    axes.grid(visible=False)
    lengths = ", ".join(f"{float(changes[place].norm() / vectors[first].norm()):.2g} at {place}" for place in later)
    axes.set_xlabel(f"dimension\nlength of the change, as a share of the vector: {lengths}")
    figure.colorbar(image, ax=axes, pad=0.01)
    return figure
