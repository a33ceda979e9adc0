"""Biases: over distance, and of every pair of query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import (
    FigureKind,
    distinct_heads,
    head_maps,
    head_names,
    legend_below,
    panels,
    plot_heads,
)
from hf_posenc.plots.schemes.probes import AWAY, bias_matrix, bias_reads_content, visible
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Tokens of the row that is drawn over distance, and of the map.
_ROW, _MAP = 257, 48
_DISTANCE_LABEL = "distance from query back to key (tokens)"
_RANDOM = f"random queries, keys and hidden states (standard normal, seed {INPUT_SEED})"


class BiasDistance(FigureKind):
    """The bias over distance, per head."""

    name = "bias_distance"
    summary = "the bias over distance, per head"

    def applies(self, subject: Subject) -> bool:
        """Whether there is a bias."""
        return subject.parts.logit_bias is not None

    def draw(self, subject: Subject) -> Figure:
        """A line per head; heads apart where their lines would hide each other."""
        row = _row(subject)
        bias = bias_matrix(subject, _ROW)[:, row, : row + 1 if subject.context.causal else _ROW]
        heads = distinct_heads(bias)
        distance = row - torch.arange(bias.shape[1])
        shown = bias.masked_fill(bias < AWAY, torch.nan)
        if len(heads) > 1 and _is_jagged(bias[heads]):
            return self._draw_apart(subject, shown, heads, distance)
        figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.3)
        plot_heads(axes, distance, shown)
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=1)
        axes.set_xlabel(_DISTANCE_LABEL)
        axes.set_ylabel("bias (logit)")
        axes.margins(x=0.01)
        legend_below(figure, axes)
        return figure

    def _draw_apart(self, subject: Subject, bias: Tensor, heads: list[int], distance: Tensor) -> Figure:
        figure, axes = panels(subject.title, len(heads), 1, 6.4, 0.95, sharex=True, sharey=True)
        for index, (head, name) in enumerate(zip(heads, head_names(heads, bias.shape[0]), strict=True)):
            axes[index].plot(distance.numpy(), bias[head].numpy(), color=COLORS[index], linewidth=1.2)
            axes[index].axhline(0, color="0.6", linewidth=0.8, zorder=1)
            axes[index].text(1.01, 0.5, name, transform=axes[index].transAxes, va="center", fontsize=9)
            axes[index].margins(x=0.01, y=0.12)
        axes[-1].set_xlabel(_DISTANCE_LABEL)
        figure.supylabel("bias (logit)", fontsize=10)
        return figure

    def caption(self, subject: Subject) -> str:
        """With the query that is drawn."""
        words = "The bias over the distance from query to key"
        if not subject.context.causal:
            words += " (negative: keys after the query)"
        if bias_reads_content(subject):
            return f"{words}, for one query at position {_row(subject)} and {_RANDOM}."
        return f"{words}, seen from position {_row(subject)}."


class BiasMap(FigureKind):
    """The bias of every pair of query and key, per head."""

    name = "bias_map"
    summary = "the bias of every query and key, per head"

    def applies(self, subject: Subject) -> bool:
        """Whether there is a bias."""
        return subject.parts.logit_bias is not None

    def draw(self, subject: Subject) -> Figure:
        """A map per head."""
        bias, shown = bias_matrix(subject, _MAP), visible(subject, _MAP)
        figure, axes = head_maps(subject, bias, (4.4, 2.9), range(0, _MAP, 16), "bias (logit)", shown)
        for panel in axes:
            panel.set_xlabel("key position")
        axes[0].set_ylabel("query position")
        return figure

    def caption(self, subject: Subject) -> str:
        """With what the bias reads."""
        words = f"Added to the logit of each query and key, {_MAP} tokens"
        words += f", for {_RANDOM}" if bias_reads_content(subject) else ""
        return words + ("; grey: later keys, which the causal mask hides." if subject.context.causal else ".")


def _row(subject: Subject) -> int:
    """The query whose keys are drawn: the last one, or the middle one where it looks both ways."""
    return _ROW - 1 if subject.context.causal else _ROW // 2


def _is_jagged(bias: Tensor) -> bool:
    """Whether the lines of `(heads, distances)` go up and down so much that they would hide each other."""
    seen = bias.masked_fill(bias < AWAY, 0.0)
    travelled = seen.diff(dim=-1).abs().sum(-1)
    return bool((travelled > 3 * (seen.amax(-1) - seen.amin(-1))).any())
