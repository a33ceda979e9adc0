"""The dog test for pictures as a figure: the picture, and how far apart its two dogs are, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.metrics.images.dog import SIDE, picture_of_two_dogs
from hf_posenc.plots.curves import Curve, draw_curves, name_lines, ticks_at
from hf_posenc.plots.dog import FLOOR
from hf_posenc.plots.style import HIGHLIGHT, save, shade, styled
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_picture_dog(result: Result, path: str | Path | None = None, dark: bool = False) -> Figure:
    """The picture with its patches, and the distance of the two dogs over the layers, one line per scheme.

    The axis is logarithmic, because a model without positions is at rounding level, many decades below the rest.

    Args:
        result: what `picture_dog_test` returned.
        path: where to save the figure; its ending names the format. `None` saves nothing.
        dark: draws for a dark page.

    Raises:
        ValueError: if no scheme of the result could be applied.
    """
    settings, grid = result.settings, result.settings["grid"]
    labels = list(dict.fromkeys(record.subject for record in result.of(quantity="relative_l2")))
    if not labels:
        raise ValueError(f"Nothing to plot: none of the schemes could be applied to {settings['model']}.")
    with styled(dark):
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        figure = Figure(figsize=(8.4, 0.6 + max(3.4, 0.25 * len(labels))))
        drawn, axes = figure.subplots(1, 2, width_ratios=[2, 3])
        picture = picture_of_two_dogs(grid, grid, tuple(settings["first"]), tuple(settings["second"]))
        drawn.imshow(picture, cmap="gray_r", vmin=0, vmax=1, extent=(0, grid, grid, 0), interpolation="nearest")
        drawn.set(xticks=range(grid + 1), yticks=range(grid + 1), xticklabels=[], yticklabels=[])
        drawn.tick_params(length=0)
        drawn.set_xlabel(f"{grid} x {grid} patches")
        for row, column in (settings["first"], settings["second"]):
            drawn.add_patch(Rectangle((column, row), SIDE, SIDE, fill=False, edgecolor=HIGHLIGHT, linewidth=2))
        axes.set_yscale("log")
        axes.set_ylim(FLOOR / 2, 3)
        axes.axhspan(FLOOR / 2, settings["tolerance"], color=shade(0.08), zorder=0, linewidth=0)
        layers = {label: list(result.of(label, "relative_l2")) for label in labels}
        curves = {
            label: Curve([record.at["layer"] for record in records], [record.value for record in records])
            for label, records in layers.items()
        }
        draw_curves(axes, curves, labels, FLOOR)
        axes.set_yticks([1, 1e-2, 1e-4, 1e-6, FLOOR], ["1", "0.01", "0.0001", "1e-6", "0"])
        ticks_at(axes, sorted({record.at["layer"] for records in layers.values() for record in records}))
        axes.set_xlabel("layer (0: input of the first layer)")
        axes.set_ylabel("distance between the two dogs")
        name_lines(axes)
        figure.suptitle(f"Two equal dogs in {settings['model']} (shaded: no difference)", fontsize=11)
        if path is not None:
            save(figure, path)
    return figure
