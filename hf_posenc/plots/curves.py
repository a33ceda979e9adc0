"""Measured curves with bands: one line per scheme, in the look that the scheme has in every figure of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posenc.plots.style import line_style, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REFERENCE: dict[str, Any] = {"color": "0.45", "linestyle": (0, (2, 2)), "linewidth": 1.2, "zorder": 1}
_BAND_OPACITY = 0.15
#: A line with more points than this carries a marker only here and there.
_FEW_POINTS = 10
#: Inches.
_WIDTH, _HEIGHT, _LEGEND_LINE = 7.2, 4.0, 0.21


@dataclass(frozen=True)
class Curve:
    """What was measured of one scheme.

    Args:
        label: of the scheme.
        x: `(points,)`.
        mean: `(points,)`; `None` leaves a gap.
        half_width: `(points,)`, the band reaches from `mean - half_width` to `mean + half_width`; `None` is no band
            at that point, an empty tuple none at all.

    Raises:
        ValueError: if the lengths differ.
    """

    label: str
    x: tuple[float, ...]
    mean: tuple[float | None, ...]
    half_width: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.x) or len(self.half_width) not in (0, len(self.x)):
            raise ValueError(
                f"The curve {self.label!r} has {len(self.x)} x values, {len(self.mean)} means and "
                f"{len(self.half_width)} half widths; expected as many of each (or no half widths)."
            )


def plot_curves(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    labels: Sequence[str] | None = None,
    reference: tuple[str, float] | None = None,
    shaded_columns: tuple[float, float] | None = None,
    shaded_rows: tuple[float, float] | None = None,
    log2_x: bool = False,
    whole_x: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    y_limits: tuple[float, float] | None = None,
) -> Figure:
    """One line per curve, its band behind it, and a legend in the order of the lines at their right end.

    Args:
        curves: what to draw.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        title: above the axes.
        labels: of all schemes that are compared, those of other figures included: a scheme looks the same wherever
            the same list is given. By default those of the curves.
        reference: name and height of a dashed horizontal line.
        shaded_columns: a grey band from x to x, such as the trained positions.
        shaded_rows: a grey band from y to y, such as the level of rounding.
        log2_x: a logarithmic axis with a tick at every x.
        whole_x: a linear axis with a tick at every x.
        floor: makes the vertical axis logarithmic; what lies lower is drawn here.
        ceiling: where the vertical axis is cut if a mean lies higher; the figure then says so.
        y_limits: ends of the vertical axis; bands that leave it are cut.

    Raises:
        ValueError: if there is nothing to draw, or a label is missing from `labels`.
    """
    if not any(value is not None for curve in curves for value in curve.mean):
        raise ValueError("There is nothing to draw: no curve has a value.")
    known = list(labels) if labels is not None else [curve.label for curve in curves]
    unknown = [curve.label for curve in curves if curve.label not in known]
    if unknown:
        raise ValueError(f"The labels lack {', '.join(unknown)}, so the look of these curves is not known.")
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH, max(_HEIGHT, 0.9 + _LEGEND_LINE * (len(curves) + 1))))
        axes = figure.add_subplot()
        for curve in curves:
            _draw(axes, curve, known, floor)
        if reference is not None:
            axes.axhline(reference[1], label=reference[0], **_REFERENCE)
        if shaded_columns is not None:
            axes.axvspan(*shaded_columns, color="0.94", zorder=0, linewidth=0)
        if floor is not None:
            axes.set_yscale("log")
            axes.set_ylim(bottom=floor * 0.7)
        if shaded_rows is not None:
            axes.axhspan(*shaded_rows, color="0.93", zorder=0, linewidth=0)
        if y_limits is not None:
            axes.set_ylim(*y_limits)
        _cut(axes, curves, ceiling)
        _ticks(axes, curves, log2_x, whole_x)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title)
        _legend(figure, axes, curves)
    return figure


def _draw(axes: Axes, curve: Curve, labels: list[str], floor: float | None) -> None:
    style = line_style(curve.label, labels)
    lowest = -math.inf if floor is None else floor
    mean = [math.nan if value is None else max(value, lowest) for value in curve.mean]
    axes.plot(curve.x, mean, label=curve.label, markevery=_marked(curve, labels), **style)
    if any(value is not None for value in curve.half_width):
        widths = [math.nan if value is None else value for value in curve.half_width]
        below = [max(middle - width, lowest) for middle, width in zip(mean, widths, strict=True)]
        above = [max(middle + width, lowest) for middle, width in zip(mean, widths, strict=True)]
        axes.fill_between(curve.x, below, above, color=style["color"], alpha=_BAND_OPACITY, linewidth=0)


def _marked(curve: Curve, labels: list[str]) -> tuple[int, int]:
    """Which points carry a marker: all of a few, else some, and other ones on each line, so that equal lines show."""
    points = len(curve.x)
    if points <= _FEW_POINTS:
        return 0, 1
    every = points // 4
    return int(labels.index(curve.label) / len(labels) * every), every


def _cut(axes: Axes, curves: Sequence[Curve], ceiling: float | None) -> None:
    highest = max(value for curve in curves for value in curve.mean if value is not None)
    if ceiling is None or highest <= ceiling:
        return
    axes.set_ylim(top=ceiling)
    note = f"cut at {ceiling:.3g}; the highest value is {highest:.3g}"
    axes.annotate(
        note, (0.01, 1.0), xytext=(0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=8, color="0.35"
    )


def _ticks(axes: Axes, curves: Sequence[Curve], log2_x: bool, whole_x: bool) -> None:
    places = sorted({x for curve in curves for x in curve.x})
    if log2_x:
        axes.set_xscale("log", base=2)
    if log2_x or whole_x:
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.minorticks_off()


def _legend(figure: Figure, axes: Axes, curves: Sequence[Curve]) -> None:
    ends = {curve.label: _last(curve) for curve in curves}
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda index: (names[index] not in ends, -ends.get(names[index], 0.0)))
    figure.legend(
        [handles[index] for index in order],
        [names[index] for index in order],
        loc="outside right center",
        frameon=False,
        handlelength=3.2,
    )


def _last(curve: Curve) -> float:
    return next((value for value in reversed(curve.mean) if value is not None), -math.inf)
