"""Draws `price.png` and `price_dark.png`: the cost of schemes, one row per scheme, with the cheapest on top."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.levels import LEVELS
from benchmarks.lineup import CONTROL
from hf_posenc.plots.style import palette, save, shade, styled
from hf_posenc.report import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {"forward": "forward", "train": "training step", "decode": "one more token"}
_KINDS = ("this library and stock models", "other libraries and other ways")
#: The most important ticks first.
_TICKS = (1, 2, 4, 8, 16, 32, 1.5, 3, 6, 1.2, 0.9, 1.1, 0.8)


def draw_price(result: Result, folder: Path) -> list[Path]:
    """Draws ratios of time to the same model without position on a logarithmic axis, one dot per length, for light and
    dark pages. Draws nothing if no row has two lengths.
    """
    frame = _frame(result)
    if frame.empty or frame.groupby(["level", "phase", "subject"]).size().max() < 2:
        return []
    paths = []
    for dark in (False, True):
        with styled(dark):
            paths.append(save(_drawn(frame), folder / f"price{'_dark' * dark}.png", colors=64))
    return paths


def _frame(result: Result) -> pd.DataFrame:
    """Returns a row for each ratio, with the shortest length of a subject first."""
    rows = []
    for record in result.records:
        phase = record.at["phase"]
        shown = record.quantity == "to_bare" or (record.quantity == "peer" and "," in record.subject)
        if shown and record.subject != CONTROL and record.value is not None:
            title = LEVELS[record.at["level"]].title.partition(",")[0]
            level, peer = title[0].lower() + title[1:], record.quantity == "peer"
            rows.append((level, _PHASES.get(phase, phase), record.subject, peer, record.at["T"], record.value))
    return pd.DataFrame(rows, columns=["level", "phase", "subject", "peer", "length", "ratio"])


def _drawn(frame: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    levels = dict(iter(frame.groupby("level", sort=False)))
    names = {level: _ordered(rows[rows.phase == rows.phase.iloc[0]]) for level, rows in levels.items()}
    heights = [0.8 + 0.21 * len(names[level]) + 0.5 * (index == 0) for index, level in enumerate(levels)]
    figure = Figure(figsize=(7.4, sum(heights)))
    parts = figure.subfigures(len(levels), 1, height_ratios=heights, squeeze=False)[:, 0]
    lengths = sorted(set(frame.length))
    sizes = {length: 2.5 + 5.5 * index / max(1, len(lengths) - 1) for index, length in enumerate(lengths)}
    for part, (level, rows) in zip(parts, levels.items(), strict=True):
        phases = rows.groupby("phase", sort=False)
        grid = part.subplots(1, len(phases), sharey=True, squeeze=False)[0]
        for axes, (phase, of_phase) in zip(grid, phases, strict=True):
            _draw_phase(axes, of_phase, names[level], sizes)
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


def _ordered(rows: pd.DataFrame) -> list[str]:
    """Returns the subjects of one phase, starting with the cheapest at its longest length."""
    return list(rows.groupby("subject", sort=False).ratio.last().sort_values(kind="stable").index)


def _draw_phase(axes: Axes, rows: pd.DataFrame, names: list[str], sizes: dict[int, float]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.axvline(1.0, color=shade(0.6), linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
    for subject, of_subject in rows[rows.subject.isin(names)].groupby("subject", sort=False):
        place, color = names.index(subject), palette()[int(of_subject.peer.iloc[0])]
        axes.plot(of_subject.ratio, [place] * len(of_subject), color=color, linewidth=1.0, alpha=0.5)
        for length, ratio in zip(of_subject.length, of_subject.ratio, strict=True):
            axes.plot(ratio, place, "o", color=color, markersize=sizes[length])
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks: list[float] = []
    for tick in _TICKS:
        # Only as many as fit side by side.
        if low <= tick <= high and all(abs(math.log(tick / other)) > math.log(high / low) / 7 for other in ticks):
            ticks.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
