"""The class for kinds of figures, and the two forms of most figures: lines, and heat maps side by side."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.metrics.statistics import spread
from hf_posenc.plots.schemes.subject import Subject
from hf_posenc.plots.style import DASHES, DIVERGING_MAP, SEQUENTIAL_MAP, palette, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITION_LABEL = "position (tokens)"
DISTANCE_LABEL = "distance from query back to key (tokens)"
#: Maximum number of heads in one figure.
SHOWN_HEADS = 4
#: If lines cross more often than this, they cannot be followed.
_CROSSINGS = 24
#: Width of every figure in inches. Text stays readable if a page or a phone makes the figure smaller.
_WIDTH = 6.0


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure: which schemes it can show, and how it draws them.

    Args:
        name: its name on the command line and in file names.
        summary: what it shows, for lists of kinds.
        applies: whether a scheme has anything to show.
        draw: draws a scheme that `applies` accepts.
        caption: sentences that describe the drawing, with its inputs, for all schemes or for a given one.
    """

    name: str
    summary: str
    applies: Callable[[Subject], bool]
    draw: Callable[[Subject], Figure]
    caption: str | Callable[[Subject], str]

    def caption_of(self, subject: Subject) -> str:
        """The caption of one scheme's drawing."""
        return self.caption if isinstance(self.caption, str) else self.caption(subject)


def figure_kind(
    applies: Callable[[Subject], bool], caption: str | Callable[[Subject], str]
) -> Callable[[Callable[[Subject], Figure]], FigureKind]:
    """Turns a function that draws a scheme into a kind of figure with its name, and its docstring as the summary."""

    def decorate(draw: Callable[[Subject], Figure]) -> FigureKind:
        summary = (inspect.getdoc(draw) or "").rstrip(".")
        return FigureKind(getattr(draw, "__name__", ""), summary[:1].lower() + summary[1:], applies, draw, caption)

    return decorate


def panels(title: str, rows: int, columns: int, height: float, **sharing: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a title and `rows x columns` axes, each `height` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height * rows + 0.35), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **sharing).flat)


def line_figure(
    subject: Subject, lines: Mapping[str, Tensor], x: Tensor, x_label: str, y_label: str
) -> tuple[Figure, Axes]:
    """Draws named lines over `x` with a legend below. The line named "unchanged" is thin and grey."""
    figure, (axes,) = panels(subject.title, 1, 1, 3.3)
    draw_lines(axes, lines, x)
    axes.set(xlabel=x_label, ylabel=y_label)
    legend_below(figure, axes)
    return figure, axes


def draw_lines(axes: Axes, lines: Mapping[str, Tensor], x: Tensor) -> None:
    """Draws each line in a different style."""
    plain: dict[str, Any] = {"color": shade(0.45), "linewidth": 1, "linestyle": (0, (2, 2))}
    looks = ({"color": color, "linestyle": DASHES[index % len(DASHES)]} for index, color in enumerate(palette()))
    for name, line in lines.items():
        axes.plot(x.numpy(), line.numpy(), label=name, **(plain if name == "unchanged" else next(looks)))
    axes.margins(x=0.01)


def map_figure(
    subject: Subject, maps: Mapping[str, Tensor], label: str, height: float, visible: Tensor | None = None
) -> tuple[Figure, list[Axes]]:
    """Draws named heat maps `(rows, columns)` with one colour scale, at most two side by side, with row 0 on top.

    Each is `height` inches high. Cells that are not `visible`, `(rows, columns)` bool, are grey and have no effect.
    """
    values = torch.stack(list(maps.values()))
    shown = torch.ones_like(values[0], dtype=torch.bool) if visible is None else visible
    scale = color_scale(values[:, shown])
    columns = min(2, len(maps))
    figure, axes = panels(subject.title, -(-len(maps) // columns), columns, height, sharex=True, sharey=True)
    for panel, (name, matrix) in zip(axes, maps.items(), strict=True):
        panel.set_facecolor(shade(0.2))
        panel.grid(visible=False)
        hidden = matrix.masked_fill(~shown, torch.nan).numpy()
        image = panel.imshow(hidden, aspect="auto", interpolation="nearest", **scale)
        if len(maps) > 1:
            panel.set_title(name, fontsize=10)
    figure.colorbar(image, ax=axes, label=label, pad=0.01)
    return figure, axes


def color_scale(values: Tensor) -> dict[str, Any]:
    """Keywords for `imshow`: diverging around zero for signed numbers, sequential for those of one sign."""
    low, high = float(values.min()), float(values.max())
    reach = max(abs(low), abs(high)) or 1.0
    if low < -1e-3 * reach and high > 1e-3 * reach:
        return {"cmap": DIVERGING_MAP, "vmin": -reach, "vmax": reach}
    if high - low < 1e-6 * reach:
        low, high = min(low, 0.0), max(high, low + reach)
    return {"cmap": SEQUENTIAL_MAP, "vmin": low, "vmax": high}


def legend_below(figure: Figure, axes: Axes) -> None:
    """Puts the legend of `axes` below the figure. A single line gets no legend, unless it is for a head."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2 and not labels[0].startswith("head"):
        return
    # About eleven characters per inch, plus the sample line before each label.
    width = sum(len(str(label)) / 11 + 0.7 for label in labels)
    columns = -(-len(labels) // -(-int(width * 100) // int(figure.get_figwidth() * 100)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def by_head(values: Tensor, compared: Tensor | None = None) -> dict[str, Tensor]:
    """Returns a few of the heads of `(heads, ...)` by name, or only the first if all heads are equal.

    They are equal if `compared`, of the same shape, is equal for all heads; by default the values themselves.
    """
    compared = values if compared is None else compared
    if torch.allclose(compared, compared[:1].expand_as(compared), rtol=1e-4, atol=1e-5, equal_nan=True):
        return {"every head": values[0]}
    heads: Iterable[int] = spread(range(values.shape[0]), SHOWN_HEADS)
    return {f"head {head + 1} of {values.shape[0]}": values[head] for head in heads}


def untangled(lines: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the lines, or only the first if they cross too often to be followed."""
    pairs = itertools.combinations(lines.values(), 2)
    crossings = sum(int(((line - other).sign().diff().abs() > 1).sum()) for line, other in pairs)
    return lines if crossings <= _CROSSINGS else dict([*lines.items()][:1])
