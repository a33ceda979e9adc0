"""`price.png` and `price_dark.png`: what a scheme costs, a row each, the cheapest on top."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.levels import LEVELS
from benchmarks.lineup import CONTROL
from hf_posenc.plots.style import palette, save, shade, styled
from hf_posenc.report import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {"forward": "forward", "train": "training step", "decode": "one more token"}
_KINDS = ("this library and stock models", "other libraries and other ways")
#: The most important ones first.
_TICKS = (1, 2, 4, 8, 16, 32, 1.5, 3, 6, 1.2, 0.9, 1.1, 0.8)


class _Row(NamedTuple):
    """Lengths and ratios of one subject in one phase, and whether it is another library's or another way."""

    lengths: list[int]
    ratios: list[float]
    peer: bool


#: By level, phase and subject.
_Rows = dict[str, dict[str, dict[str, _Row]]]


def draw_price(result: Result, folder: Path) -> list[Path]:
    """Draws the ratios of time to that of the same model without position, logarithmic, a dot per length.

    Args:
        result: of `price_result`.
        folder: where the files go.

    Returns:
        The files, for light and dark pages; none where there is nothing to draw: a row needs two lengths.
    """
    rows = _rows(result)
    if not any(
        len(row.lengths) > 1
        for phases in rows.values()
        for by_subject in phases.values()
        for row in by_subject.values()
    ):
        return []
    paths = []
    for dark in (False, True):
        with styled(dark):
            paths.append(save(_drawn(rows), folder / f"price{'_dark' * dark}.png", colors=64))
    return paths


def _rows(result: Result) -> _Rows:
    rows: _Rows = {}
    for record in result.records:
        level, phase = record.at["level"], record.at["phase"]
        shown = record.quantity == "to_bare" or (record.quantity == "peer" and "," in record.subject)
        if shown and record.subject != CONTROL and record.value is not None:
            title = LEVELS[level].title.partition(",")[0]
            phases = rows.setdefault(title[0].lower() + title[1:], {})
            by_subject = phases.setdefault(_PHASES.get(phase, phase), {})
            row = by_subject.setdefault(record.subject, _Row([], [], record.quantity == "peer"))
            row.lengths.append(record.at["T"])
            row.ratios.append(record.value)
    return rows


def _drawn(rows: _Rows) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = {level: _ordered(next(iter(phases.values()))) for level, phases in rows.items()}
    heights = [0.8 + 0.21 * len(names[level]) + 0.5 * (index == 0) for index, level in enumerate(rows)]
    figure = Figure(figsize=(7.4, sum(heights)))
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    lengths = sorted(
        {
            length
            for phases in rows.values()
            for row in phases.values()
            for subject in row.values()
            for length in subject.lengths
        }
    )
    sizes = {length: 2.5 + 5.5 * index / max(1, len(lengths) - 1) for index, length in enumerate(lengths)}
    for part, (level, phases) in zip(parts, rows.items(), strict=True):
        grid = part.subplots(1, len(phases), sharey=True, squeeze=False)[0]
        for axes, (phase, by_subject) in zip(grid, phases.items(), strict=True):
            _draw_phase(axes, [by_subject.get(name) for name in names[level]], sizes)
            axes.set_title(f"{level}, {phase}" if axes is grid[0] else phase, fontsize=10)
        grid[0].set_yticks(range(len(names[level])), names[level])
        grid[0].set_ylim(len(names[level]) - 0.4, -0.6)
    parts[-1].supxlabel("time / time of the same model without position encoding", fontsize=10)
    look: dict[str, Any] = {"marker": "o", "linestyle": "none"}
    handles = [Line2D([], [], color=color, label=name, **look) for color, name in zip(palette(), _KINDS, strict=False)]
    for length, size in sizes.items():
        handles.append(Line2D([], [], color=shade(0.6), markersize=size, label=f"{length:,} tokens", **look))
    parts[0].legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _ordered(by_subject: dict[str, _Row]) -> list[str]:
    """The cheapest at its longest length first."""
    return sorted(by_subject, key=lambda name: by_subject[name].ratios[-1])


def _draw_phase(axes: Axes, rows: list[_Row | None], sizes: dict[int, float]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.axvline(1.0, color=shade(0.6), linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
    for place, row in enumerate(rows):
        if row is not None:
            color = palette()[int(row.peer)]
            axes.plot(row.ratios, [place] * len(row.ratios), color=color, linewidth=1.0, alpha=0.5)
            for length, ratio in zip(row.lengths, row.ratios, strict=True):
                axes.plot(ratio, place, "o", color=color, markersize=sizes[length])
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks: list[float] = []
    for tick in _TICKS:
        # Only as many as fit beside each other.
        if low <= tick <= high and all(abs(math.log(tick / other)) > math.log(high / low) / 7 for other in ticks):
            ticks.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
