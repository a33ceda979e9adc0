"""A figure of the loss by length and by position, for one model with several schemes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.plots.curves import curves_of, draw_curves, name_lines, ticks_at
from hf_posenc.plots.style import line_style, titled_figure
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(result: Result, path: str | Path | None = None, dark: bool = False) -> Figure:
    """Plots the mean loss by length and, below it, the loss by position for the longest length.

    The loss with a sliding window is a dashed line in the colour of its scheme. `result` is what `text_losses`
    returned. The other arguments and the error are those of `plot_dog`.
    """
    lengths, curves = result.settings["lengths"], curves_of(result, "loss", "length")
    bins = curves_of(result, "position_loss", "start", "stop")
    labels = list(curves)
    with titled_figure(result.settings["model"], (6.4, 6.4), path, dark) as figure:
        by_length, by_position = figure.subplots(2, 1)
        by_length.set_xscale("log", base=2)
        ticks_at(by_length, lengths)
        for axes, drawn in ((by_length, curves), (by_position, bins)):
            draw_curves(axes, drawn, labels)
        sliding = [record for record in result.of(quantity="sliding_loss") if record.value is not None]
        for record in sliding:
            color = line_style(record.subject, labels)["color"]
            by_length.axhline(record.value, color=color, linestyle=(0, (4, 3)), linewidth=1.0)
        name_lines(by_length)
        name_lines(by_position)
        predicted = "tokens" if result.settings["causal"] else "masked tokens"
        by_length.set(
            xlabel=f"length in tokens{' (dashed: read in a sliding window)' if sliding else ''}",
            ylabel=f"mean loss of {predicted} (nats)",
        )
        by_position.set(xlabel=f"position in pieces of {lengths[-1]} tokens", ylabel="loss (nats per token)")
    return figure
