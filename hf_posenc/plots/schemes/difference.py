"""One token at three positions: what the encoding changes about its vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import added_vectors, mapped_vectors, random_query
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLACES = (0, 50, 99)
_SHOWN = 64


def _applies(subject: Subject) -> bool:
    return subject.parts.additive is not None or subject.parts.query_key_map is not None


def _vectors(subject: Subject) -> Tensor:
    """`(3, dimensions)`: the same token at each of the places."""
    length = _PLACES[-1] + 1
    if subject.parts.additive is not None:
        vectors = added_vectors(subject, length)
        token = torch.randn(vectors.shape[1], generator=torch.Generator().manual_seed(INPUT_SEED))
        return (token + vectors)[list(_PLACES)]
    return mapped_vectors(subject, random_query(subject), length)[list(_PLACES)]


def _draw(subject: Subject) -> Figure:
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


def _caption(subject: Subject) -> str:
    what = "token embedding plus the added vector" if subject.parts.additive is not None else "query after the map"
    places = ", ".join(str(place) for place in _PLACES[:-1])
    return (
        f"One random {what}, at positions {places} and {_PLACES[-1]}, and how far the later ones are from the first "
        f"(standard normal before encoding, seed {INPUT_SEED})."
    )


KIND = FigureKind(
    "difference", "one encoded vector at positions 0, 50 and 99, and the differences", _applies, _draw, _caption
)
