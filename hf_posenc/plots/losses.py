"""Loss by length and by position of one model under several schemes, as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.plots.curves import Curve, draw_curves, name_lines, ticks_at
from hf_posenc.plots.style import line_style, save, styled
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(result: Result, path: str | Path | None = None, dark: bool = False) -> Figure:
    """Mean loss over the lengths, and below it the loss over the positions of the longest one.

    The loss of the sliding window is a dashed line in the colour of its scheme.

    Args:
        result: what `text_losses` returned.
        path: where to save the figure; its ending names the format. `None` saves nothing.
        dark: draws for a dark page.

    Raises:
        ValueError: if no scheme of the result could be measured.
    """
    labels = list(dict.fromkeys(record.subject for record in result.records))
    if not labels:
        raise ValueError(f"Nothing to plot: none of the schemes could be measured on {result.settings['model']}.")
    lengths = result.settings["lengths"]
    with styled(dark):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 6.4))
        by_length, by_position = figure.subplots(2, 1)
        by_length.set_xscale("log", base=2)
        ticks_at(by_length, lengths)
        means = {label: list(result.of(label, "loss")) for label in labels}
        places = {label: list(result.of(label, "position_loss")) for label in labels}
        curves = {
            label: Curve([one.at["length"] for one in losses], [one.value for one in losses])
            for label, losses in means.items()
        }
        bins = {
            label: Curve([(one.at["start"] + one.at["stop"]) / 2 for one in losses], [one.value for one in losses])
            for label, losses in places.items()
        }
        for axes, drawn in ((by_length, curves), (by_position, bins)):
            draw_curves(axes, drawn, labels)
        for one in result.of(quantity="sliding_loss"):
            if one.value is not None:
                color = line_style(one.subject, labels)["color"]
                by_length.axhline(one.value, color=color, linestyle=(0, (4, 3)), linewidth=1.0)
        name_lines(by_length)
        name_lines(by_position)
        by_length.set_xlabel("length in tokens (dashed: read in a sliding window)")
        by_length.set_ylabel(f"mean loss of {'tokens' if result.settings['causal'] else 'masked tokens'} (nats)")
        by_position.set_xlabel(f"position in pieces of {lengths[-1]} tokens")
        by_position.set_ylabel("loss (nats per token)")
        figure.suptitle(result.settings["model"], fontsize=11)
        if path is not None:
            save(figure, path)
    return figure
