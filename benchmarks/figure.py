"""`price.png`: what a scheme costs over length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lineup import CONTROL
from hf_posenc.plots.style import line_style, styled
from hf_posenc.report import Result

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

Series = dict[str, list[tuple[int, float]]]


def draw_price(result: Result, folder: Path) -> Path | None:
    """Draws what there is of five panels: time over length, both logarithmic.

    Args:
        result: of `price_result`.
        folder: where `price.png` goes.

    Returns:
        The file, or `None` where there is nothing to draw: a line needs two lengths.
    """
    panels = [(title, found) for level, phase, title in _PANELS if (found := _series(result, level, phase))]
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


def _series(result: Result, level: str, phase: str) -> Series:
    """Ratios to the bare model by subject, those of one length only left out."""
    series: Series = {}
    for record in result.records:
        here = record.quantity in ("to_bare", "peer") and (record.at["level"], record.at["phase"]) == (level, phase)
        if here and record.subject != CONTROL and record.value is not None:
            series.setdefault(record.subject, []).append((record.at["T"], record.value))
    return {name: points for name, points in series.items() if len(points) > 1}


def _draw(axes: Axes, series: Series, title: str) -> None:
    looks = [*_NAMED, *_PEERS]
    named = [name for name in looks if name in series]
    for name, points in series.items():
        if name not in named and " " not in name:
            axes.plot(*zip(*points, strict=True), color="0.82", linewidth=0.9, zorder=1)
    for name in named:
        style = line_style(name, looks) | ({"linestyle": (0, (1, 1.2))} if name in _PEERS else {})
        axes.plot(*zip(*series[name], strict=True), label=name, **style)
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
    # The names stand in the order of the lines at their right end.
    order = sorted(named, key=lambda name: -series[name][-1][1])
    lines = {line.get_label(): line for line in axes.get_lines()}
    axes.legend([lines[name] for name in order], order, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _ratio_ticks(axes: Axes, values: Sequence[float]) -> None:
    low, high = min([*values, 1.0]) / 1.04, max(values) * 1.06
    steps: tuple[float, ...] = (0.8, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    if high > 3:
        steps = tuple(step for step in steps if step not in (1.05, 1.1))
    shown = [step for step in steps if low <= step <= high]
    axes.set_ylim(low, high)
    axes.set_yticks(shown, [f"{step:g}" for step in shown])
