"""The factor of all logits of a query, over its position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import distinct_heads, head_names, legend_below, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.subject import Subject
from hf_posenc.plots.style import COLORS, DASHES
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 2**17


def _applies(subject: Subject) -> bool:
    return subject.parts.logit_scale is not None


def _scales(subject: Subject) -> tuple[Tensor, Tensor]:
    """Positions, `(points,)`, and the factor at each, `(heads or 1, points)`."""
    assert subject.parts.logit_scale is not None
    ids = torch.logspace(0, 17, 400, base=2).round().long().unique() - 1
    with torch.no_grad():
        scale = subject.parts.logit_scale(Positions(ids.unsqueeze(0), torch.tensor([[_LENGTH]])))
    return ids, scale[0].float()


def _draw(subject: Subject) -> Figure:
    ids, scale = _scales(subject)
    heads = distinct_heads(scale)
    figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.2)
    names = head_names(heads, scale.shape[0]) if scale.shape[0] > 1 else ["every head"]
    for index, (head, name) in enumerate(zip(heads, names, strict=True)):
        axes.plot((ids + 1).numpy(), scale[head].numpy(), color=COLORS[index], linestyle=DASHES[index], label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position + 1 (tokens)")
    axes.set_ylabel("factor of the logits")
    legend_below(figure, axes)
    return figure


def _caption(subject: Subject) -> str:
    return f"The factor of all logits of a query, over its position in a sequence of {_LENGTH} tokens."


KIND = FigureKind("logit_scale", "the factor of the logits over position", _applies, _draw, _caption)
