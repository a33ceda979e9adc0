"""What the kinds of figures have in common: panels, colour scales, heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.plots.schemes.probes import AWAY
from hf_posenc.plots.style import DIVERGING_MAP, MASKED_COLOR, SEQUENTIAL_MAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

POSITION_LABEL = "position (tokens)"
#: At most this many heads are told apart in one figure.
SHOWN_HEADS = 4


def panels(
    title: str, rows: int, columns: int, width: float, height: float, **sharing: Any
) -> tuple[Figure, list[Axes]]:
    """A figure under a title with `rows x columns` axes, each of `width x height` inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows + 0.35), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **sharing).flat)


def color_scale(values: Tensor) -> dict[str, Any]:
    """Keywords for `imshow`: diverging around zero for signed numbers, sequential for those of one sign.

    Numbers that only say "never look here" do not stretch the scale.
    """
    finite = values[torch.isfinite(values) & (values > AWAY)]
    if finite.numel() == 0:
        return {"cmap": SEQUENTIAL_MAP, "vmin": 0.0, "vmax": 1.0}
    low, high = float(finite.min()), float(finite.max())
    reach = max(abs(low), abs(high)) or 1.0
    if low < -1e-3 * reach and high > 1e-3 * reach:
        return {"cmap": DIVERGING_MAP, "vmin": -reach, "vmax": reach}
    if high - low < 1e-6 * reach:
        low, high = min(low, 0.0), max(high, low + reach)
    return {"cmap": SEQUENTIAL_MAP, "vmin": low, "vmax": high}


def heat(axes: Axes, matrix: Tensor, scale: dict[str, Any], visible: Tensor | None = None) -> AxesImage:
    """A heat map of `(rows, columns)`, row 0 on top, with the pairs that are not `visible` in grey."""
    shown = matrix if visible is None else matrix.masked_fill(~visible, torch.nan)
    axes.set_facecolor(MASKED_COLOR)
    axes.grid(visible=False)
    return axes.imshow(shown.numpy(), aspect="auto", interpolation="nearest", **scale)


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of `axes` under the figure, where it hides nothing, in as many lines as its width asks for."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # About eleven characters to the inch, and the line that each label stands beside.
        width = sum(len(str(label)) / 11 + 0.7 for label in labels)
        columns = -(-len(labels) // -(-int(width * 100) // int(figure.get_figwidth() * 100)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def chosen(count: int, most: int = SHOWN_HEADS) -> list[int]:
    """At most `most` of `0 .. count - 1`, evenly spread with both ends."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def distinct_heads(values: Tensor) -> list[int]:
    """The heads to show of `(heads, ...)`: a few, or only the first where all heads are equal."""
    if torch.allclose(values, values[:1].expand_as(values), rtol=1e-4, atol=1e-5, equal_nan=True):
        return [0]
    return chosen(values.shape[0])


def head_names(heads: list[int], count: int) -> list[str]:
    """Labels for `heads` of `count`."""
    if heads == [0] and count > 1:
        return ["every head"]
    return [f"head {head + 1} of {count}" for head in heads]
