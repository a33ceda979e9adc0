"""Loss by length and by position of one model under several schemes, as a figure."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.metrics.language_modeling import TextLosses
from hf_posenc.plots.style import line_style, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(result: TextLosses, path: str | Path | None = None) -> Figure:
    """Mean loss over the lengths, and beside it the loss over the positions of the longest one.

    The loss of the sliding window is a dashed line in the colour of its scheme.

    Args:
        result: what `text_losses` returned.
        path: where to save the figure; its ending names the format. `None` saves nothing.

    Raises:
        ValueError: if no scheme of the result could be measured.
    """
    measured = [(row.label, row.value) for row in result.rows if row.value is not None]
    if not measured:
        raise ValueError(f"Nothing to plot: none of the schemes could be measured on {result.model}.")
    labels = [label for label, _ in measured]
    with styled():
        figure, (by_length, by_position) = new_figure(2)
        for label, losses in measured:
            style = line_style(label, labels)
            by_length.plot(losses.lengths, [_height(row.loss) for row in losses.rows], label=label, **style)
            if losses.sliding is not None and losses.sliding.loss is not None:
                by_length.axhline(losses.sliding.loss, color=style["color"], linestyle=(0, (4, 3)), linewidth=1.0)
            middles = [(start + stop) / 2 for start, stop in itertools.pairwise(losses.position_edges)]
            by_position.plot(middles, [_height(loss) for loss in losses.position_loss], **style)
        lengths = measured[0][1].lengths
        by_length.set_xscale("log", base=2)
        by_length.set_xticks(lengths, [str(length) for length in lengths])
        by_length.minorticks_off()
        sliding = any(losses.sliding is not None for _, losses in measured)
        by_length.set_xlabel("length in tokens" + (" (dashed: sliding window)" if sliding else ""))
        by_length.set_ylabel(f"mean loss of {'tokens' if result.causal else 'masked tokens'} (nats)")
        by_position.set_xlabel(f"position in pieces of {lengths[-1]} tokens")
        by_position.set_ylabel("loss (nats per token)")
        figure.legend(*by_length.get_legend_handles_labels(), loc="outside right upper", frameon=False)
        figure.suptitle(result.model, fontsize=11)
        if path is not None:
            figure.savefig(path, dpi=110)
    return figure


def _height(loss: float | None) -> float:
    return math.nan if loss is None else loss
