"""`price.png`: what a scheme costs over length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lineup import BARE, CONTROL
from hf_posenc.plots.style import line_style, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: In the order of their looks; all other schemes are grey lines without a name.
_NAMED = (
    *("none", "stock", "sinusoidal", "learned", "rope", "alibi", "t5", "kerple", "shaw", "fire", "forget_gate", "cope"),
)
_PEERS = (
    "sdpa",
    "alibi, mask built in each call",
    "alibi, mask built once",
    "alibi, FlexAttention score_mod",
    "BLOOM, alibi",
    "T5, bias computed in each call",
    "x-transformers, T5 bias",
)
_PANELS = (
    ("attention", "forward", "One attention call, forward"),
    ("attention", "train", "One attention call, forward and backward"),
    ("model", "forward", "A small Llama, forward"),
    ("model", "train", "A small Llama, training step"),
    ("model", "decode", "A small Llama, one token behind a cache"),
)
#: Inches.
_WIDTH, _HEIGHT = 5.4, 4.4
#: Of the height of the axes, between two labels.
_LABEL_GAP = 0.042

Series = dict[str, list[tuple[int, float]]]


def draw_price(content: dict[str, Any], folder: Path) -> Path | None:
    """Draws what there is of five panels: time over length, both logarithmic.

    Args:
        content: of `results.json`.
        folder: where `price.png` goes.

    Returns:
        The file, or `None` where there is nothing to draw: a line needs two lengths.
    """
    panels = [(title, found) for level, phase, title in _PANELS if (found := _series(content, level, phase))]
    if not panels:
        return None
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows))
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (title, series) in zip(grid.flat, panels, strict=False):
            _draw(axes, series, title)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        folder.mkdir(parents=True, exist_ok=True)
        path, partial = folder / "price.png", folder / "price.partial.png"
        figure.savefig(partial, dpi=110, metadata={"Software": None})
        partial.replace(path)
    return path


def _series(content: dict[str, Any], level: str, phase: str) -> Series:
    """Ratios to the bare model by subject, those of one length only left out."""
    series: Series = {}
    for cell in sorted(content["cells"].values(), key=lambda cell: cell["length"]):
        if (cell["level"], cell["phase"]) != (level, phase):
            continue
        for row in cell["rows"]:
            if "to_bare" in row and row["subject"] not in (BARE, CONTROL):
                series.setdefault(row["subject"], []).append((cell["length"], row["to_bare"]["median"]))
    return {name: points for name, points in series.items() if len(points) > 1}


def _draw(axes: Axes, series: Series, title: str) -> None:
    looks = [*_NAMED, *_PEERS]
    named = [name for name in looks if name in series]
    for name, points in series.items():
        if name not in named and " " not in name:
            axes.plot(*zip(*points, strict=True), color="0.82", linewidth=0.9, zorder=1)
    for name in named:
        style = line_style(name, looks) | ({"linestyle": (0, (1, 1.2))} if name in _PEERS else {})
        axes.plot(*zip(*series[name], strict=True), **style)
    axes.axhline(1.0, color="0.45", linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({length for points in series.values() for length, _ in points})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    _ratio_ticks(axes, [value for points in series.values() for _, value in points])
    axes.set_xlabel("tokens")
    axes.set_ylabel("time / time without position")
    axes.set_title(title)
    _label(axes, {name: series[name][-1] for name in named}, {name: line_style(name, looks)["color"] for name in named})


def _ratio_ticks(axes: Axes, values: Sequence[float]) -> None:
    low, high = min([*values, 1.0]) / 1.04, max(values) * 1.06
    steps: tuple[float, ...] = (0.8, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    if high > 3:
        steps = tuple(step for step in steps if step not in (1.05, 1.1))
    shown = [step for step in steps if low <= step <= high]
    axes.set_ylim(low, high)
    axes.set_yticks(shown, [f"{step:g}" for step in shown])


def _label(axes: Axes, ends: dict[str, tuple[int, float]], colors: dict[str, str]) -> None:
    """Names the lines at their right end, the names moved apart where the lines are close."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = {name: (math.log(value) - low) / (high - low) for name, (_, value) in ends.items()}
    placed = spread_labels(heights, _LABEL_GAP)
    for name, height in placed.items():
        axes.annotate(
            name,
            xy=ends[name],
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colors[name],
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colors[name], "linewidth": 0.5, "alpha": 0.6},
        )


def spread_labels(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Heights that keep their order and are at least `gap` apart, as near to the wanted ones as groups allow."""
    groups: list[list[str]] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        groups.append([name])
        while len(groups) > 1 and _bottom(groups[-1], heights, gap) < _top(groups[-2], heights, gap) + gap:
            last = groups.pop()
            groups[-1] += last
    placed: dict[str, float] = {}
    for group in groups:
        bottom = _bottom(group, heights, gap)
        placed |= {name: bottom + gap * index for index, name in enumerate(group)}
    return placed


def _bottom(group: list[str], heights: dict[str, float], gap: float) -> float:
    centre = sum(heights[name] for name in group) / len(group)
    return centre - gap * (len(group) - 1) / 2


def _top(group: list[str], heights: dict[str, float], gap: float) -> float:
    return _bottom(group, heights, gap) + gap * (len(group) - 1)
