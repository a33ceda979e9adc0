"""Figures of the dog tests: the distance between the two dogs in each layer, and the picture that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.plots.curves import Curve, curves_of, draw_curves, name_lines, ticks_at
from hf_posenc.plots.style import HIGHLIGHT, shade, titled_figure
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The lower end of the logarithmic axis. An exact zero is drawn here.
FLOOR = 1e-9


def plot_dog(result: Result, path: str | Path | None = None, dark: bool = False) -> Figure:
    """Plots the distance between the two occurrences by layer, with one line per scheme.

    The axis is logarithmic: a model without positions is at rounding level, many powers of ten below the others. In a
    causal model the mask alone separates the two. A second panel shows them in random attention without a mask.

    Args:
        result: what `dog_test` returned.
        path: where to save the figure. Its extension determines the format. `None` saves nothing.
        dark: whether to draw for a dark page.

    Raises:
        ValueError: if no scheme of the result could be applied.
    """
    settings, curves = result.settings, curves_of(result, "relative_l2", "layer")
    title = f"\u201c{settings['sentence']}\u201d in {settings['model']} (shaded: no difference)"
    with titled_figure(title, (6.4, _height(curves)), path, dark) as figure:
        ratios = [3, 1] if settings["causal"] else [1]
        both = figure.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for axes in both:
            _set_up(axes, settings["tolerance"])
        _draw_layers(both[0], curves)
        both[0].set(xlabel="layer (0: embeddings)", ylabel=f"distance between the two {settings['word']!r}")
        if settings["causal"]:
            probes = {label: Curve([0], [result.value(label, "probe")]) for label in curves}
            draw_curves(both[1], probes, list(curves), FLOOR)
            both[1].set(xticks=[], xlabel="random attention,\nno mask")
        name_lines(both[-1])
    return figure


def plot_picture_dog(result: Result, path: str | Path | None = None, dark: bool = False) -> Figure:
    """Plots the picture with its patches, and the distance between the two dogs by layer, with one line per scheme.

    The axis is logarithmic. `result` is what `picture_dog_test` returned. The other arguments and the error are those
    of `plot_dog`.
    """
    settings, grid, curves = result.settings, result.settings["grid"], curves_of(result, "relative_l2", "layer")
    title = f"Two equal dogs in {settings['model']} (shaded: no difference)"
    with titled_figure(title, (8.4, _height(curves)), path, dark) as figure:
        from matplotlib.patches import Rectangle

        from hf_posenc.metrics.images.sensitivity import SIDE, picture_of_two_dogs

        drawn, axes = figure.subplots(1, 2, width_ratios=[2, 3])
        picture = picture_of_two_dogs(grid, grid, tuple(settings["first"]), tuple(settings["second"]))
        drawn.imshow(picture, cmap="gray_r", vmin=0, vmax=1, extent=(0, grid, grid, 0), interpolation="nearest")
        drawn.set(xticks=range(grid + 1), yticks=range(grid + 1), xticklabels=[], yticklabels=[])
        drawn.tick_params(length=0)
        drawn.set_xlabel(f"{grid} x {grid} patches")
        for row, column in (settings["first"], settings["second"]):
            drawn.add_patch(Rectangle((column, row), SIDE, SIDE, fill=False, edgecolor=HIGHLIGHT, linewidth=2))
        _set_up(axes, settings["tolerance"])
        _draw_layers(axes, curves)
        axes.set(xlabel="layer (0: input of the first layer)", ylabel="distance between the two dogs")
        name_lines(axes)
    return figure


def _height(curves: Mapping[str, Curve]) -> float:
    return 0.6 + max(3.4, 0.25 * len(curves))


def _set_up(axes: Axes, tolerance: float) -> None:
    axes.set(yscale="log", ylim=(FLOOR / 2, 3))
    axes.axhspan(FLOOR / 2, tolerance, color=shade(0.08), zorder=0, linewidth=0)


def _draw_layers(axes: Axes, curves: Mapping[str, Curve]) -> None:
    draw_curves(axes, curves, list(curves), FLOOR)
    axes.set_yticks([1, 1e-2, 1e-4, 1e-6, FLOOR], ["1", "0.01", "0.0001", "1e-6", "0"])
    ticks_at(axes, sorted({x for curve in curves.values() for x in curve.x}))
