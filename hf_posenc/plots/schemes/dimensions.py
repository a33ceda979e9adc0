"""Single dimensions over position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posenc.plots.schemes.drawing import POSITION_LABEL, legend_below, panels
from hf_posenc.plots.schemes.heat_map import encoded_dimensions
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.subject import Subject
from hf_posenc.plots.style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 128
_SHOWN = 6


def _applies(subject: Subject) -> bool:
    return subject.parts.additive is not None or subject.parts.query_key_map is not None


def _draw(subject: Subject) -> Figure:
    matrices, _ = encoded_dimensions(subject, _LENGTH)
    figure, axes = panels(subject.title, _SHOWN, 1, 6.4, 0.72, sharex=True, sharey=True)
    dashes = ("solid", (0, (4, 2)))
    # The second half of most layouts repeats the frequencies of the first.
    width = matrices[0][1].shape[1] // len(matrices)
    # Closer together at the start, where most schemes have what changes within a few positions.
    shown = [round((index / (_SHOWN - 1)) ** 1.5 * (width - 1)) for index in range(_SHOWN)]
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


def _caption(subject: Subject) -> str:
    _, words = encoded_dimensions(subject, 2)
    return f"Single dimensions over {_LENGTH} positions: {words}."


KIND = FigureKind("dimensions", "single dimensions over position", _applies, _draw, _caption)
