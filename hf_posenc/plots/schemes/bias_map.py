"""The bias of every pair of query and key, per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posenc.plots.schemes.drawing import color_scale, distinct_heads, head_names, heat, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import bias_matrix, bias_reads_content, visible
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 48


def _applies(subject: Subject) -> bool:
    return subject.parts.logit_bias is not None


def _draw(subject: Subject) -> Figure:
    shown = visible(subject, _LENGTH)
    bias = bias_matrix(subject, _LENGTH)
    heads = distinct_heads(bias.masked_fill(~shown, 0.0))
    scale = color_scale(bias[heads][:, shown])
    figure, axes = panels(subject.title, 1, len(heads), 4.4 if len(heads) == 1 else 2.45, 2.9, sharey=True)
    images = [heat(panel, bias[head], scale, shown) for panel, head in zip(axes, heads, strict=True)]
    for panel, name in zip(axes, head_names(heads, bias.shape[0]), strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("key position")
        panel.set_xticks(range(0, _LENGTH, 16))
        panel.set_yticks(range(0, _LENGTH, 16))
    axes[0].set_ylabel("query position")
    away = bool((bias[heads][:, shown] < scale["vmin"]).any())
    figure.colorbar(images[0], ax=axes, label="bias (logit)", pad=0.01, extend="min" if away else "neither")
    return figure


def _caption(subject: Subject) -> str:
    words = f"Added to the logit of each query and key, {_LENGTH} tokens"
    if bias_reads_content(subject):
        words += f", for random queries, keys and hidden states (standard normal, seed {INPUT_SEED})"
    return words + ("; grey: later keys, which the causal mask hides." if subject.context.causal else ".")


KIND = FigureKind("bias_map", "the bias of every query and key, per head", _applies, _draw, _caption)
