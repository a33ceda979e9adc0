"""The dog test as a figure: how far apart the two occurrences are, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.plots.style import line_style, styled
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Where the logarithmic axis ends; an exact zero is drawn here.
FLOOR = 1e-9


def plot_dog(result: Result, path: str | Path | None = None) -> Figure:
    """Relative L2 distance over the layers, one line per scheme, and beside it that of the probe.

    The axis is logarithmic, because a model without positions is at rounding level, many decades below the rest.

    Args:
        result: what `dog_test` returned.
        path: where to save the figure; its ending names the format. `None` saves nothing.

    Raises:
        ValueError: if no scheme of the result could be applied.
    """
    labels = list(dict.fromkeys(record.subject for record in result.of(quantity="relative_l2")))
    if not labels:
        raise ValueError(f"Nothing to plot: none of the schemes could be applied to {result.settings['model']}.")
    with styled():
        figure = _drawn(result, labels)
        if path is not None:
            figure.savefig(path, dpi=110)
    return figure


def _drawn(result: Result, labels: list[str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 0.6 + max(3.4, 0.3 * len(labels))), layout="constrained")
    layers_axes, probe_axes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    for index, label in enumerate(labels):
        style = line_style(label, labels) | {"clip_on": False}
        distances = {record.at["layer"]: record.value or 0.0 for record in result.of(label, "relative_l2")}
        layers_axes.plot(
            list(distances), [max(distance, FLOOR) for distance in distances.values()], label=label, **style
        )
        probe = result.value(label, "probe")
        if probe is not None:
            probe_axes.plot([index], [max(probe, FLOOR)], **(style | {"linestyle": "none", "markersize": 7}))
    layers_axes.axhspan(FLOOR, result.settings["tolerance"], color="0.92", zorder=0)
    layers_axes.set_yscale("log")
    layers_axes.set_ylim(FLOOR, 3)
    decades = [10.0**exponent for exponent in (0, -2, -4, -6)]
    layers_axes.set_yticks([*decades, FLOOR], [*(f"{decade:g}" for decade in decades), "0"])
    layers_axes.minorticks_off()
    layers_axes.set_xticks(sorted({record.at["layer"] for record in result.of(quantity="relative_l2")}))
    layers_axes.set_xlabel("layer (0: embeddings)")
    layers_axes.set_ylabel(f"distance of the two {result.settings['word']!r} (relative L2)")
    direction = "causal" if result.settings["causal"] else "bidirectional"
    layers_axes.set_title(f"{result.settings['model']}, {direction}", fontsize=10)
    probe_axes.set_title("probe", fontsize=10)
    probe_axes.set_xticks([])
    for axes in (layers_axes, probe_axes):
        axes.grid(visible=False, axis="x")
    figure.legend(*layers_axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"\u201c{result.settings['sentence']}\u201d (grey: rounding)", fontsize=11)
    return figure
