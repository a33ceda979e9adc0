"""Logits of equal queries and keys, and the factor of logits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.metrics.properties.decay import envelope
from hf_posenc.plots.schemes.drawing import FigureKind, head_maps, legend_below, panels, plot_heads
from hf_posenc.plots.schemes.probes import added_vectors, equal_query_key_logits, turning_frequencies
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS, DASHES
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LENGTH, _SAMPLES = 257, 24
#: Of a grid, in tokens.
_SIDE = 15
#: Of the sequence in which logits are scaled.
_FAR = 2**17


class Decay(FigureKind):
    """How the similarity of equal tokens falls with their distance."""

    name = "decay"
    summary = "logit of equal query and key over distance"

    def applies(self, subject: Subject) -> bool:
        """Whether the scheme is one of all layers."""
        return not isinstance(subject.config, LayeredConfig)

    def draw(self, subject: Subject) -> Figure:
        """Products of added vectors, or logits, beside them RoFormer's envelope where it holds."""
        spectrum = _spectrum(subject)
        columns = 1 if spectrum is None else 2
        figure, (axes, *others) = panels(subject.title, 1, columns, 6.0 if columns == 1 else 4.4, 3.3)
        (_draw_vectors if _only_adds(subject) else _draw_logits)(axes, subject)
        axes.margins(x=0.01)
        if spectrum is not None:
            distances = torch.arange(_LENGTH)
            others[0].plot(envelope(spectrum, distances).numpy(), color=COLORS[1])
            others[0].set_ylim(bottom=0)
            others[0].margins(x=0.01)
            others[0].set_title("RoFormer's envelope", fontsize=10)
            others[0].set_xlabel("distance (tokens)")
            others[0].set_ylabel("mean |partial sum|")
        legend_below(figure, axes)
        return figure

    def caption(self, subject: Subject) -> str:
        """With the vectors that are compared."""
        if _only_adds(subject):
            return "Product of the added vectors of two positions, per component, over their distance."
        words = (
            f"Mean logit of a query and an equal key over their distance, for {_SAMPLES} random vectors (standard "
            f"normal, seed {INPUT_SEED}) in every head, query at position {_LENGTH - 1}"
        )
        if subject.parts.additive is not None:
            words += "; without what is added to embeddings"
        if _spectrum(subject) is not None:
            words += "; beside it RoFormer's upper envelope for these frequencies (arXiv:2104.09864, section 3.4.3)"
        return words + "."


def _only_adds(subject: Subject) -> bool:
    return list(subject.parts) == [subject.parts.additive]


def _spectrum(subject: Subject) -> Tensor | None:
    """`(pairs,)`: the frequencies of a rotation whose pairs all heads share, where nothing else decides the logits.

    RoFormer's bound holds for rotations: not where the map also changes the length of queries or keys, nor beside a
    bias.
    """
    frequencies = None if _only_adds(subject) else turning_frequencies(subject, _LENGTH)
    if frequencies is None or frequencies.shape[0] != 1 or subject.parts.logit_bias is not None:
        return None
    return frequencies.flatten() if _keeps_lengths(subject) else None


def _keeps_lengths(subject: Subject) -> bool:
    part = subject.parts.query_key_map
    assert part is not None
    query, key, _ = subject.random_heads(1)
    query, key = (vectors.expand(-1, -1, _LENGTH, -1) for vectors in (query, key))
    with torch.no_grad():
        phases = part.phases(subject.positions(_LENGTH))
        mapped = (part.map_query(query, phases), part.map_key(key, phases))
    norms = [vectors.norm(dim=-1) for vectors in mapped]
    return all(torch.allclose(norm, norm[..., :1].expand_as(norm), rtol=1e-4) for norm in norms)


def _draw_vectors(axes: Axes, subject: Subject) -> None:
    vectors = added_vectors(subject, _LENGTH)
    for index, query in enumerate((64, 128, _LENGTH - 1)):
        products = vectors[: query + 1] @ vectors[query] / vectors.shape[1]
        look = {"color": COLORS[index], "linestyle": DASHES[index], "label": f"from position {query}"}
        axes.plot(range(query + 1), products.flip(0).numpy(), **look)
    axes.set_xlabel("distance back (tokens)")
    axes.set_ylabel("mean product of components")


def _draw_logits(axes: Axes, subject: Subject) -> None:
    logits = equal_query_key_logits(subject, subject.positions(_LENGTH), _SAMPLES)[:, :, -1].flip(-1)
    heads = plot_heads(axes, range(_LENGTH), logits.mean(0))
    if len(heads) == 1:
        low, high = (logits[:, 0].quantile(share, dim=0).numpy() for share in (0.1, 0.9))
        axes.fill_between(range(_LENGTH), low, high, color=COLORS[0], alpha=0.18, linewidth=0, label="80 % of tokens")
    axes.set_title("equal query and key", fontsize=10)
    axes.set_xlabel("distance back (tokens)")
    axes.set_ylabel("logit")


class Grid(FigureKind):
    """Tokens on a grid: the logit of equal query and key over rows and columns."""

    name = "grid"
    summary = "logit of equal query and key over rows and columns"

    def applies(self, subject: Subject) -> bool:
        """Whether the scheme reads coordinates on several axes."""
        return (_axes_count(subject) or 0) > 1

    def draw(self, subject: Subject) -> Figure:
        """A map per head, with a cross at the query."""
        axes_count = _axes_count(subject)
        assert axes_count is not None
        logits = equal_query_key_logits(subject, _grid_positions(subject, axes_count), _SAMPLES)
        mean = logits.mean(0)[:, _SIDE**2 // 2].unflatten(-1, (_SIDE, _SIDE))
        figure, axes = head_maps(subject, mean, (4.2, 3.2), range(0, _SIDE, 7), "logit")
        for panel in axes:
            panel.set_xlabel("column of the key")
            panel.set_aspect("equal")
            panel.scatter([_SIDE // 2], [_SIDE // 2], marker="x", color="#D55E00", s=30)
        axes[0].set_ylabel("row of the key")
        return figure

    def caption(self, subject: Subject) -> str:
        """With the size of the grid."""
        return (
            f"Mean logit of a query in the centre of a grid of {_SIDE} x {_SIDE} tokens (cross) and an equal key at "
            f"every place of it, for {_SAMPLES} random vectors (standard normal, seed {INPUT_SEED}) in every head."
        )


def _axes_count(subject: Subject) -> int | None:
    """How many axes the scheme's coordinates have; `None` where it reads none."""
    for part in subject.parts:
        if part.reads_coordinates:
            inner = next((module for module in part.modules() if hasattr(module, "axes")), None)
            return int(getattr(inner, "axes", 2))
    return None


def _grid_positions(subject: Subject, axes: int) -> Positions:
    """The tokens of a square grid, row by row: row and column on the last two axes, zero on the others."""
    ids = torch.arange(_SIDE**2)
    coordinates = torch.zeros(axes, 1, _SIDE**2, dtype=torch.int64)
    coordinates[-2, 0], coordinates[-1, 0] = ids // _SIDE, ids % _SIDE
    return dataclasses.replace(subject.positions(_SIDE**2), coordinates=coordinates)


class LogitScale(FigureKind):
    """The factor of all logits of a query, over its position."""

    name = "logit_scale"
    summary = "the factor of the logits over position"

    def applies(self, subject: Subject) -> bool:
        """Whether logits are scaled."""
        return subject.parts.logit_scale is not None

    def draw(self, subject: Subject) -> Figure:
        """A line per head."""
        assert subject.parts.logit_scale is not None
        ids = torch.logspace(0, 17, 400, base=2).round().long().unique() - 1
        with torch.no_grad():
            scale = subject.parts.logit_scale(Positions(ids.unsqueeze(0), torch.tensor([[_FAR]])))[0].float()
        figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.2)
        # A scale of one row is that of every head.
        plot_heads(axes, ids + 1, scale if scale.shape[0] > 1 else scale.expand(2, -1))
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position + 1 (tokens)")
        axes.set_ylabel("factor of the logits")
        legend_below(figure, axes)
        return figure

    def caption(self, subject: Subject) -> str:
        """With the length of the sequence."""
        return f"The factor of all logits of a query, over its position in a sequence of {_FAR} tokens."
