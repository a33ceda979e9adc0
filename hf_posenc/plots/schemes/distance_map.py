"""How far apart a pairwise position map puts query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import legend_below, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.subject import Subject
from hf_posenc.plots.style import COLORS
from hf_posenc.schemes.position_maps.pairwise import FarPositions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WINDOWS_SHOWN = 4


def _far_positions(subject: Subject) -> FarPositions | None:
    found = (getattr(module, "far", None) for part in subject.parts for module in part.modules())
    return next((far for far in found if isinstance(far, FarPositions)), None)


def mapped_distances(far: FarPositions, length: int) -> Tensor:
    """`(length,)`: the distance the scheme gives to a key `0 .. length - 1` tokens before the query.

    The query stands at `length - 1`.
    """
    distance = torch.arange(length)
    query = torch.tensor(length - 1)
    return (far.query(query) - far.key(query - distance)).where(distance >= far.window, distance)


def _applies(subject: Subject) -> bool:
    return _far_positions(subject) is not None


def _draw(subject: Subject) -> Figure:
    far = _far_positions(subject)
    assert far is not None
    length = _WINDOWS_SHOWN * far.window
    figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.5)
    axes.plot([0, length - 1], [0, length - 1], color="0.6", linewidth=1, linestyle=(0, (2, 2)), label="unchanged")
    axes.plot(mapped_distances(far, length).numpy(), color=COLORS[0], label="this scheme")
    axes.axvline(far.window, color=COLORS[1], linewidth=1, linestyle=(0, (5, 2)), label="window")
    axes.set_xlabel("distance from query back to key (tokens)")
    axes.set_ylabel("distance after the map")
    axes.margins(x=0.01)
    legend_below(figure, axes)
    return figure


def _caption(subject: Subject) -> str:
    return (
        "The distance at which the scheme sees a key, over its distance from the query; keys past the window are far."
    )


KIND = FigureKind("distance_map", "the distance of each pair after a pairwise position map", _applies, _draw, _caption)
