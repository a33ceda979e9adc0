"""Line plots that compare schemes. Each line has its name at its end; equal lines are drawn once, with all names."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hf_posenc.plots.style import FIXED_LOOKS, line_style, shade
from hf_posenc.report.records import Record, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Lines coincide if their heights differ by at most this share of the axis and by at most this share of themselves
#: (different lines may be close on a logarithmic axis), and the ends of their bands by at most this share of the axis.
_ALIKE, _ALIKE_RELATIVE, _ALIKE_BAND = 0.008, 0.01, 0.04
#: A line with more points than this has markers at only some of them.
_FEW_POINTS = 10
#: Height of a line of text in inches, its maximum length in characters, and the x of the names in widths of the axes.
_TEXT, _NAME_WIDTH, _NAMES_AT = 0.17, 24, 1.06


class Curve(NamedTuple):
    """A line: `(points,)` values per field. `None` in `mean` leaves a gap; `low` and `high` are the ends of a band."""

    x: Sequence[float]
    mean: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def curves_of(result: Result, quantity: str, *x: str) -> dict[str, Curve]:
    """Returns a line for each measured scheme. Its x is the mean of the values that `Record.at` has for the keys `x`.

    Raises:
        ValueError: if no scheme could be measured.
    """
    by_subject: dict[str, list[Record]] = {}
    for record in result.of(quantity=quantity):
        by_subject.setdefault(record.subject, []).append(record)
    if not by_subject:
        raise ValueError(f"Nothing to plot: none of the schemes could be measured on {result.settings['model']}.")
    return {
        label: Curve([sum(row.at[key] for key in x) / len(x) for row in rows], [row.value for row in rows])
        for label, rows in by_subject.items()
    }


def draw_curves(
    axes: Axes,
    curves: Mapping[str, Curve],
    labels: Sequence[str],
    floor: float = -math.inf,
    ceiling: float = math.inf,
) -> None:
    """Draws the lines of several schemes.

    Args:
        axes: where to draw. Its scales must be set already.
        curves: by scheme. If several coincide, one of them is drawn, with all their names.
        labels: all schemes of the comparison. They determine the style of each line.
        floor: on a logarithmic axis, lower values are drawn at this height.
        ceiling: the upper end of the axis. Differences above it do not matter when lines are compared.
    """
    heights = {label: np.maximum(np.array(curve.mean, dtype=float), floor) for label, curve in curves.items()}
    scaled = {label: _on_axis(axes, curve, floor, ceiling) for label, curve in curves.items()}
    reach = np.concatenate([heights[0] for heights in scaled.values()])
    reach = reach[np.isfinite(reach)]
    width = float(reach.max() - reach.min()) if len(reach) else 0.0
    apart = width * np.array([[_ALIKE], [_ALIKE_BAND], [_ALIKE_BAND]])
    groups: list[list[str]] = []
    for label, curve in curves.items():
        for group in groups:
            first = group[0]
            if (
                list(curve.x) == list(curves[first].x)
                and np.allclose(heights[label], heights[first], rtol=_ALIKE_RELATIVE, atol=0, equal_nan=True)
                and np.allclose(scaled[label], scaled[first], rtol=0, atol=apart, equal_nan=True)
            ):
                group.append(label)
                break
        else:
            groups.append([label])
    for group in groups:
        # A scheme with a fixed style determines the style of the group.
        first, *others = sorted(group, key=lambda label: label not in FIXED_LOOKS)
        curve, style = curves[first], line_style(first, list(labels))
        every = 1 if len(curve.x) <= _FEW_POINTS else len(curve.x) // 4
        axes.plot(curve.x, heights[first], label=", ".join([first, *others]), markevery=every, **style)
        if any(value is not None for value in curve.low):
            ends = (np.maximum(np.array(values, dtype=float), floor) for values in (curve.low, curve.high))
            axes.fill_between(curve.x, *ends, color=style["color"], alpha=0.15, linewidth=0)


def _on_axis(axes: Axes, curve: Curve, floor: float, ceiling: float) -> np.ndarray:
    """Heights on the axis of a line and of the ends of its band, `(3, points)`; NaN where a value is missing."""
    rows = []
    for values in (curve.mean, curve.low, curve.high):
        heights = np.clip(np.array(values if len(values) else [None] * len(curve.x), dtype=float), floor, ceiling)
        rows.append(axes.transScale.transform([(1.0, height) for height in heights])[:, 1])
    return np.array(rows)


def name_lines(axes: Axes) -> None:
    """Writes the name of each line to the right of the axes and connects it to the last point of the line.

    Call it last: it fixes the limits of the axes.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    named: list[tuple[float, float, str, str]] = []
    for line in axes.get_lines():
        drawn = np.asarray(line.get_xydata(), dtype=float)
        drawn = drawn[~np.isnan(drawn).any(axis=1)]
        if not str(line.get_label()).startswith("_") and len(drawn):
            across, up = np.clip(axes.transLimits.transform(axes.transScale.transform(drawn[-1])), 0.0, 1.0)
            # A level line spans the axes, and its x values are in the coordinates of the axes.
            across = across if line.get_transform().contains_branch_seperately(axes.transData)[0] else 1.0
            label = textwrap.fill(str(line.get_label()), _NAME_WIDTH, break_long_words=False, break_on_hyphens=False)
            named.append((float(up), float(across), label, str(line.get_color())))
    named.sort()
    room = _TEXT * axes.figure.dpi / axes.bbox.height
    places = _spread([(up, room * (1 + label.count("\n"))) for up, _, label, _ in named])
    for (up, across, label, color), place in zip(named, places, strict=True):
        axes.annotate(
            label, (across, up), (_NAMES_AT, place), "axes fraction", va="center", fontsize=9, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 1.0, "shrinkA": 1, "shrinkB": 0,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def _spread(names: list[tuple[float, float]]) -> list[float]:
    """Places names, given in ascending order as (wanted place, height), as near to there as fits without overlap."""
    groups: list[tuple[float, list[float]]] = []
    for wish, height in names:
        groups.append((wish, [height]))
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < (sum(groups[-1][1]) + sum(groups[-2][1])) / 2:
            (first, below), (second, above) = groups[-2:]
            middle = (first * len(below) + second * len(above)) / len(below + above)
            groups[-2:] = [(middle, below + above)]
    places: list[float] = []
    for middle, heights in groups:
        bottom = middle - sum(heights) / 2
        for height in heights:
            places.append(bottom + height / 2)
            bottom += height
    return places


def mark_level(axes: Axes, height: float, label: str) -> None:
    """Draws a dashed line at a height that schemes are compared with."""
    axes.axhline(height, label=label, color=shade(0.6), linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)


def ticks_at(axes: Axes, places: Sequence[float]) -> None:
    """Puts ticks at exactly these places of the horizontal axis."""
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.minorticks_off()
