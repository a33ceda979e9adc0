"""The bias over distance, per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import distinct_heads, head_names, legend_below, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import AWAY, bias_matrix, bias_reads_content
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS, DASHES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 257
_DISTANCE_LABEL = "distance from query back to key (tokens)"


def _applies(subject: Subject) -> bool:
    return subject.parts.logit_bias is not None


def _row(subject: Subject) -> int:
    """The query whose keys are drawn: the last one, or the middle one where it looks both ways."""
    return _LENGTH - 1 if subject.context.causal else _LENGTH // 2


def _draw(subject: Subject) -> Figure:
    row = _row(subject)
    bias = bias_matrix(subject, _LENGTH)[:, row, : row + 1 if subject.context.causal else _LENGTH]
    heads = distinct_heads(bias)
    distance = row - torch.arange(bias.shape[1])
    if len(heads) > 1 and _is_jagged(bias[heads]):
        return _draw_apart(subject, bias, heads, distance)
    figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.3)
    for index, (head, name) in enumerate(zip(heads, head_names(heads, bias.shape[0]), strict=True)):
        values = bias[head].masked_fill(bias[head] < AWAY, torch.nan)
        axes.plot(distance.numpy(), values.numpy(), label=name, color=COLORS[index], linestyle=DASHES[index])
    axes.axhline(0, color="0.6", linewidth=0.8, zorder=1)
    axes.set_xlabel(_DISTANCE_LABEL)
    axes.set_ylabel("bias (logit)")
    axes.margins(x=0.01)
    legend_below(figure, axes)
    return figure


def _is_jagged(bias: Tensor) -> bool:
    """Whether the lines of `(heads, distances)` go up and down so much that they would hide each other."""
    seen = bias.masked_fill(bias < AWAY, 0.0)
    travelled = seen.diff(dim=-1).abs().sum(-1)
    return bool((travelled > 3 * (seen.amax(-1) - seen.amin(-1))).any())


def _draw_apart(subject: Subject, bias: Tensor, heads: list[int], distance: Tensor) -> Figure:
    figure, axes = panels(subject.title, len(heads), 1, 6.4, 0.95, sharex=True, sharey=True)
    for index, (head, name) in enumerate(zip(heads, head_names(heads, bias.shape[0]), strict=True)):
        values = bias[head].masked_fill(bias[head] < AWAY, torch.nan)
        axes[index].plot(distance.numpy(), values.numpy(), color=COLORS[index], linewidth=1.2)
        axes[index].axhline(0, color="0.6", linewidth=0.8, zorder=1)
        axes[index].text(1.01, 0.5, name, transform=axes[index].transAxes, va="center", fontsize=9)
        axes[index].margins(x=0.01, y=0.12)
    axes[-1].set_xlabel(_DISTANCE_LABEL)
    figure.supylabel("bias (logit)", fontsize=10)
    return figure


def _caption(subject: Subject) -> str:
    words = "The bias over the distance from query to key"
    if not subject.context.causal:
        words += " (negative: keys after the query)"
    if bias_reads_content(subject):
        words += (
            f", for one query at position {_row(subject)} and random queries, keys and hidden states (standard normal, "
            f"seed {INPUT_SEED})"
        )
    else:
        words += f", seen from position {_row(subject)}"
    return words + "."


KIND = FigureKind("bias_distance", "the bias over distance, per head", _applies, _draw, _caption)
