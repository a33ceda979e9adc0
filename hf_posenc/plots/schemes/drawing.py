"""What the kinds of figures have in common: what a kind is, panels, colour scales, heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.plots.schemes.probes import AWAY
from hf_posenc.plots.schemes.subject import Subject
from hf_posenc.plots.style import COLORS, DASHES, DIVERGING_MAP, MASKED_COLOR, SEQUENTIAL_MAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

POSITION_LABEL = "position (tokens)"
#: At most this many heads are told apart in one figure.
SHOWN_HEADS = 4


class FigureKind(ABC):
    """A kind of figure: which schemes it can show, and how."""

    #: What it is called on the command line and in file names.
    name: ClassVar[str]
    #: What it shows, for lists of kinds.
    summary: ClassVar[str]

    @abstractmethod
    def applies(self, subject: Subject) -> bool:
        """Whether a scheme has anything to show here."""

    @abstractmethod
    def draw(self, subject: Subject) -> Figure:
        """Draws a scheme that `applies` accepts."""

    @abstractmethod
    def caption(self, subject: Subject) -> str:
        """Sentences that say what is drawn for this scheme, with its inputs."""


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


def plot_heads(axes: Axes, x: Tensor | range, values: Tensor) -> list[int]:
    """A line for each of the heads of `(heads, points)` that differ, named; returns these heads."""
    heads = distinct_heads(values)
    for index, (head, name) in enumerate(zip(heads, head_names(heads, values.shape[0]), strict=True)):
        axes.plot(x, values[head].numpy(), color=COLORS[index], linestyle=DASHES[index], label=name)
    return heads


def head_maps(
    subject: Subject,
    values: Tensor,
    size: tuple[float, float],
    ticks: range,
    label: str,
    visible: Tensor | None = None,
) -> tuple[Figure, list[Axes]]:
    """A heat map `(rows, columns)` for each of the heads that differ, side by side on one colour scale.

    Args:
        subject: what is drawn.
        values: `(heads, rows, columns)`.
        size: width of a single map and height, in inches.
        ticks: on both axes.
        label: of the colours.
        visible: `(rows, columns)` bool; the others are grey and count for nothing.
    """
    shown = torch.ones_like(values[0], dtype=torch.bool) if visible is None else visible
    heads = distinct_heads(values.masked_fill(~shown, 0.0))
    scale = color_scale(values[heads][:, shown])
    figure, axes = panels(subject.title, 1, len(heads), size[0] if len(heads) == 1 else 2.45, size[1], sharey=True)
    images = [heat(panel, values[head], scale, shown) for panel, head in zip(axes, heads, strict=True)]
    for panel, name in zip(axes, head_names(heads, values.shape[0]), strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xticks(ticks)
        panel.set_yticks(ticks)
    away = bool((values[heads][:, shown] < scale["vmin"]).any())
    figure.colorbar(images[0], ax=axes, label=label, pad=0.01, extend="min" if away else "neither")
    return figure, axes
