"""Loss by length and by position of one model under several schemes, as a figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.plots.style import line_style, new_figure, styled
from hf_posenc.report.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(result: Result, path: str | Path | None = None) -> Figure:
    """Mean loss over the lengths, and beside it the loss over the positions of the longest one.

    The loss of the sliding window is a dashed line in the colour of its scheme.

    Args:
        result: what `text_losses` returned.
        path: where to save the figure; its ending names the format. `None` saves nothing.

    Raises:
        ValueError: if no scheme of the result could be measured.
    """
    labels = list(dict.fromkeys(record.subject for record in result.records))
    if not labels:
        raise ValueError(f"Nothing to plot: none of the schemes could be measured on {result.settings['model']}.")
    lengths = result.settings["lengths"]
    with styled():
        figure, (by_length, by_position) = new_figure(2)
        for label in labels:
            style = line_style(label, labels)
            losses = {record.at["length"]: record.value for record in result.of(label, "loss")}
            by_length.plot(list(losses), [_height(loss) for loss in losses.values()], label=label, **style)
            for record in result.of(label, "sliding_loss"):
                if record.value is not None:
                    by_length.axhline(record.value, color=style["color"], linestyle=(0, (4, 3)), linewidth=1.0)
            bins = list(result.of(label, "position_loss"))
            middles = [(record.at["start"] + record.at["stop"]) / 2 for record in bins]
            by_position.plot(middles, [_height(record.value) for record in bins], **style)
        by_length.set_xscale("log", base=2)
        by_length.set_xticks(lengths, [str(length) for length in lengths])
        by_length.minorticks_off()
        sliding = any(result.of(quantity="sliding_loss"))
        by_length.set_xlabel("length in tokens" + (" (dashed: sliding window)" if sliding else ""))
        by_length.set_ylabel(f"mean loss of {'tokens' if result.settings['causal'] else 'masked tokens'} (nats)")
        by_position.set_xlabel(f"position in pieces of {lengths[-1]} tokens")
        by_position.set_ylabel("loss (nats per token)")
        figure.legend(*by_length.get_legend_handles_labels(), loc="outside right upper", frameon=False)
        figure.suptitle(result.settings["model"], fontsize=11)
        if path is not None:
            figure.savefig(path, dpi=110)
    return figure


def _height(loss: float | None) -> float:
    return math.nan if loss is None else loss
