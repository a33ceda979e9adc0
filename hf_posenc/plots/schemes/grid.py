"""Tokens on a grid: the logit of equal query and key over rows and columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hf_posenc.plots.schemes.drawing import color_scale, distinct_heads, head_names, heat, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import equal_query_key_logits
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE = 15
_SAMPLES = 24


def _axes_count(subject: Subject) -> int | None:
    """How many axes the scheme's coordinates have; `None` where it reads none."""
    for part in subject.parts:
        if part.reads_coordinates:
            inner = next((module for module in part.modules() if hasattr(module, "axes")), None)
            return int(getattr(inner, "axes", 2))
    return None


def _applies(subject: Subject) -> bool:
    axes = _axes_count(subject)
    return axes is not None and axes > 1


def _grid_positions(subject: Subject, axes: int) -> Positions:
    """The tokens of a square grid, row by row: row and column on the last two axes, zero on the others."""
    ids = torch.arange(_SIDE**2)
    coordinates = torch.zeros(axes, 1, _SIDE**2, dtype=torch.int64)
    coordinates[-2, 0], coordinates[-1, 0] = ids // _SIDE, ids % _SIDE
    return dataclasses.replace(subject.positions(_SIDE**2), coordinates=coordinates)


def _draw(subject: Subject) -> Figure:
    axes_count = _axes_count(subject)
    assert axes_count is not None
    logits = equal_query_key_logits(subject, _grid_positions(subject, axes_count), _SAMPLES)
    center = _SIDE**2 // 2
    mean = logits.mean(0)[:, center].unflatten(-1, (_SIDE, _SIDE))
    heads = distinct_heads(mean)
    scale = color_scale(mean[heads])
    figure, panel_axes = panels(subject.title, 1, len(heads), 4.2 if len(heads) == 1 else 2.45, 3.2, sharey=True)
    images = [heat(panel, mean[head], scale) for panel, head in zip(panel_axes, heads, strict=True)]
    for panel, name in zip(panel_axes, head_names(heads, mean.shape[0]), strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("column of the key")
        panel.set_aspect("equal")
        panel.scatter([_SIDE // 2], [_SIDE // 2], marker="x", color="#D55E00", s=30)
        panel.set_xticks(range(0, _SIDE, 7))
        panel.set_yticks(range(0, _SIDE, 7))
    panel_axes[0].set_ylabel("row of the key")
    figure.colorbar(images[0], ax=panel_axes, label="logit", pad=0.01)
    return figure


def _caption(subject: Subject) -> str:
    return (
        f"Mean logit of a query in the centre of a grid of {_SIDE} x {_SIDE} tokens (cross) and an equal key at every "
        f"place of it, for {_SAMPLES} random vectors (standard normal, seed {INPUT_SEED}) in every head."
    )


KIND = FigureKind("grid", "logit of equal query and key over rows and columns", _applies, _draw, _caption)
