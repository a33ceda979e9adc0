"""The dog test as a figure: how far apart the two occurrences are, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.plots.curves import Curve, draw_curves, name_lines, ticks_at
from hf_posenc.plots.style import save, shade, styled
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Where the logarithmic axis ends; an exact zero is drawn here.
FLOOR = 1e-9


def plot_dog(result: Result, path: str | Path | None = None, dark: bool = False) -> Figure:
    """Distance of the two occurrences over the layers, one line per scheme.

    The axis is logarithmic, because a model without positions is at rounding level, many decades below the rest. In a
    causal model the mask alone separates the two; a second panel shows them in random attention without a mask.

    Args:
        result: what `dog_test` returned.
        path: where to save the figure; its ending names the format. `None` saves nothing.
        dark: draws for a dark page.

    Raises:
        ValueError: if no scheme of the result could be applied.
    """
    settings = result.settings
    labels = list(dict.fromkeys(record.subject for record in result.of(quantity="relative_l2")))
    if not labels:
        raise ValueError(f"Nothing to plot: none of the schemes could be applied to {settings['model']}.")
    with styled(dark):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 0.6 + max(3.4, 0.25 * len(labels))))
        ratios = [3, 1] if settings["causal"] else [1]
        both = figure.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for axes in both:
            axes.set_yscale("log")
            axes.set_ylim(FLOOR / 2, 3)
            axes.axhspan(FLOOR / 2, settings["tolerance"], color=shade(0.08), zorder=0, linewidth=0)
        layers = {label: list(result.of(label, "relative_l2")) for label in labels}
        curves = {
            label: Curve([record.at["layer"] for record in records], [record.value for record in records])
            for label, records in layers.items()
        }
        draw_curves(both[0], curves, labels, FLOOR)
        both[0].set_yticks([1, 1e-2, 1e-4, 1e-6, FLOOR], ["1", "0.01", "0.0001", "1e-6", "0"])
        ticks_at(both[0], sorted({record.at["layer"] for records in layers.values() for record in records}))
        both[0].set_xlabel("layer (0: embeddings)")
        both[0].set_ylabel(f"distance between the two {settings['word']!r}")
        if settings["causal"]:
            probes = {label: Curve([0], [result.value(label, "probe")]) for label in labels}
            draw_curves(both[1], probes, labels, FLOOR)
            both[1].set(xticks=[], xlabel="random attention,\nno mask")
        name_lines(both[-1])
        figure.suptitle(
            f"\u201c{settings['sentence']}\u201d in {settings['model']} (shaded: no difference)", fontsize=11
        )
        if path is not None:
            save(figure, path)
    return figure
