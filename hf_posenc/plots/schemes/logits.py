"""Figures of biases, of logits of equal queries and keys, and of the factor of logits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.metrics.properties.decay import envelope, rotation_frequencies
from hf_posenc.plots.schemes.drawing import (
    by_head,
    draw_lines,
    figure_kind,
    legend_below,
    line_figure,
    map_figure,
    panels,
    untangled,
)
from hf_posenc.plots.schemes.subject import (
    AWAY,
    INPUT_SEED,
    Subject,
    added_vectors,
    bias_matrix,
    equal_query_key_logits,
    visible,
)
from hf_posenc.plots.style import HIGHLIGHT, palette
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.position_maps.pairwise import FarRotation, HiddenPairs
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Number of tokens in curves over distance, in maps of a bias, and along a side of the grid.
_LENGTH, _MAP, _SIDE = 257, 128, 15
_SAMPLES = 24
#: Query positions for products of added vectors. A difference below this share of the largest product is invisible.
_QUERIES, _ALIKE = (_LENGTH - 1, 128, 64), 0.01
#: Length of the sequence in which logits are scaled.
_FAR = 2**17
_RANDOM = f"standard normal, seed {INPUT_SEED}"


def _random_inputs(subject: Subject) -> str:
    """Describes the inputs of a bias that depends on more than the distance; empty for other biases."""
    if isinstance(subject.parts.logit_bias, DistanceBias):
        return ""
    return f", for random queries, keys and hidden states ({_RANDOM})"


def _has_bias(subject: Subject) -> bool:
    # A bias that changes only far pairs has no effect at these distances. It has its own figure (`distance_map`).
    bias = subject.parts.logit_bias
    return bias is not None and not all(isinstance(summand, FarRotation | HiddenPairs) for summand in bias.summands())


def _row(subject: Subject) -> int:
    return _LENGTH - 1 if subject.context.causal else _LENGTH // 2


@figure_kind(
    _has_bias,
    lambda subject: (
        "Left: the bias over the distance from query to key"
        f"{'' if subject.context.causal else ' (negative: later keys)'}, seen from position {_row(subject)}"
        f"{_random_inputs(subject)}. Right: the attention weight that the bias leaves to a key, relative to the "
        "distance with the largest bias of that head. Its axis is logarithmic. Where a line is at 0, the head "
        "ignores the key. Only the first head is drawn if the lines of the heads cross too often."
    ),
)
def bias_distance(subject: Subject) -> Figure:
    """The bias over distance, per head, and the weight that it leaves."""
    # Distances are counted from the last query, or from the middle one if the model is bidirectional.
    row = _row(subject)
    bias = bias_matrix(subject, _LENGTH)[:, row]
    lines = untangled(by_head(bias.masked_fill(bias < AWAY, torch.nan), bias))
    figure, (axes, weights) = panels(subject.title, 1, 2, 3.3)
    distances = row - torch.arange(_LENGTH)
    draw_lines(axes, lines, distances)
    draw_lines(weights, {name: (line - line[~line.isnan()].max()).exp() for name, line in lines.items()}, distances)
    axes.set_ylabel("bias (added to the logit)")
    weights.set(ylabel="share of weight kept", ylim=(-0.03, 1.03))
    weights.set_xscale("symlog", base=2, linthresh=1)
    weights.set_xlim(left=-0.2 if subject.context.causal else None)
    for panel, ticks in ((axes, range(0, _LENGTH, 64)), (weights, (0, 1, 4, 16, 64, 256))):
        reach = [tick for tick in ticks if tick <= row]
        labelled = reach if subject.context.causal else [*(-tick for tick in reach[:0:-1]), *reach]
        panel.set_xticks(labelled, list(map(str, labelled)))
        panel.set_xlabel("distance back (tokens)")
    legend_below(figure, axes)
    return figure


@figure_kind(
    _has_bias,
    lambda subject: (
        f"The attention weight that the bias leaves to each key, relative to the key with the largest bias of that "
        f"head. One row per query, one column per key, {_MAP} tokens{_random_inputs(subject)}. Yellow keys keep their "
        f"full weight, dark keys hardly any{'. The causal mask hides the grey half' if subject.context.causal else ''}."
    ),
)
def bias_map(subject: Subject) -> Figure:
    """The attention weight that the bias leaves to every key, per head."""
    # The share of its weight that each key keeps, which runs from 0 to 1 in every head.
    bias, shown = bias_matrix(subject, _MAP), visible(subject, _MAP)
    kept = (bias - bias.masked_fill(~shown, -torch.inf).amax(-1, keepdim=True)).exp()
    maps = by_head(kept, bias.masked_fill(~shown, 0.0))
    figure, axes = map_figure(subject, maps, "share of weight kept", 2.5 if len(maps) > 1 else 3.6, shown)
    for panel in axes:
        panel.set(xticks=range(0, _MAP + 1, 32), yticks=range(0, _MAP + 1, 32))
    figure.supxlabel("position of the key", fontsize=10)
    figure.supylabel("position of the query", fontsize=10)
    return figure


def _is_added(subject: Subject) -> bool:
    return list(subject.parts) == [subject.parts.additive]


def _has_decay(subject: Subject) -> bool:
    """Whether to draw `decay`. Biases have their own figure, and a factor of all logits does not depend on distance."""
    if isinstance(subject.config, LayeredConfig):
        return False
    return _is_added(subject) or subject.parts.query_key_map is not None or not list(subject.parts)


def _decay_caption(subject: Subject) -> str:
    if _is_added(subject):
        return (
            "The similarity of the vectors added at two positions (their product, per component), over the distance "
            "between them."
        )
    words = (
        f"The logit of a query at position {_LENGTH - 1} and an equal key, over the distance between them. The line is "
        f"the mean of {_SAMPLES} random vectors ({_RANDOM}), and the band contains 80 % of them"
    )
    if rotation_frequencies(subject.parts, _LENGTH) is not None:
        words += (
            ". Right: the upper bound that RoFormer derives from these frequencies (arXiv:2104.09864, section 3.4.3)"
        )
    return f"{words}. If a line falls, the scheme favours near tokens."


@figure_kind(_has_decay, _decay_caption)
def decay(subject: Subject) -> Figure:
    """How much equal tokens attract each other, over distance."""
    # Products of added vectors, or logits. RoFormer's envelope is next to them if it applies.
    distances, spectrum = torch.arange(_LENGTH), rotation_frequencies(subject.parts, _LENGTH)
    figure, (axes, *others) = panels(subject.title, 1, 1 if spectrum is None else 2, 3.2)
    axes.set_xlabel("distance back (tokens)")
    if _is_added(subject):
        vectors = added_vectors(subject, _LENGTH)
        products = vectors @ vectors.T / vectors.shape[1]
        unseen = {query: torch.full((_LENGTH - 1 - query,), torch.nan) for query in _QUERIES}
        last, *earlier = (torch.cat((products[at, : at + 1].flip(0), after)) for at, after in unseen.items())
        reach = float(last.abs().max())
        same = all(bool(((line - last).abs() < _ALIKE * reach)[~line.isnan()].all()) for line in earlier)
        names = [f"query at position {query}" for query in _QUERIES]
        lines = {"any query": last} if same else dict(zip(names, (last, *earlier), strict=True))
        lines = untangled(lines)
        axes.set_ylabel("product of the added vectors")
    else:
        logits = equal_query_key_logits(subject, subject.positions(_LENGTH), _SAMPLES)[:, :, -1].flip(-1)
        heads = by_head(logits.mean(0))
        lines = untangled(heads)
        if len(heads) == 1:
            low, high = (logits[:, 0].quantile(share, dim=0).numpy() for share in (0.1, 0.9))
            axes.fill_between(distances, low, high, color=palette()[0], alpha=0.25, linewidth=0)
        axes.set_ylabel("logit of equal query and key")
    draw_lines(axes, lines, distances)
    if spectrum is not None:
        draw_lines(others[0], {"bound": envelope(spectrum, distances)}, distances)
        others[0].set_ylim(bottom=0)
        others[0].set(xlabel="distance (tokens)", ylabel="RoFormer's bound")
    legend_below(figure, axes)
    return figure


def _axes_count(subject: Subject) -> int:
    """The number of axes of the scheme's coordinates; 0 if it reads none."""
    for part in subject.parts:
        if part.reads_coordinates:
            inner = next((module for module in part.modules() if hasattr(module, "axes")), None)
            return int(getattr(inner, "axes", 2))
    return 0


@figure_kind(
    lambda subject: _axes_count(subject) > 1,
    f"The logit of a query in the centre of a grid of {_SIDE} x {_SIDE} tokens (cross) and an equal key at each place, "
    f"as the mean of {_SAMPLES} random vectors ({_RANDOM}). Yellow places have the largest logits.",
)
def grid(subject: Subject) -> Figure:
    """How much equal tokens attract each other, over rows and columns."""
    # A map per head, with a cross at the query: row and column on the last two axes, zero on the others.
    ids = torch.arange(_SIDE**2)
    coordinates = torch.zeros(_axes_count(subject), 1, _SIDE**2, dtype=torch.int64)
    coordinates[-2, 0], coordinates[-1, 0] = ids // _SIDE, ids % _SIDE
    positions = dataclasses.replace(subject.positions(_SIDE**2), coordinates=coordinates)
    logits = equal_query_key_logits(subject, positions, _SAMPLES).mean(0)[:, _SIDE**2 // 2]
    figure, axes = map_figure(subject, by_head(logits.unflatten(-1, (_SIDE, _SIDE))), "logit", 3.6)
    for panel in axes:
        ticks = range(0, _SIDE, 7)
        panel.set(xlabel="column of the key", xticks=ticks, yticks=ticks, aspect="equal")
        panel.scatter([_SIDE // 2], [_SIDE // 2], marker="x", color=HIGHLIGHT, s=40)
    axes[0].set_ylabel("row of the key")
    return figure


@figure_kind(
    lambda subject: subject.parts.logit_scale is not None,
    f"The factor of all logits of a query, over the position of the query in a text of {_FAR:,} "
    "tokens. A larger factor makes attention sharper.",
)
def logit_scale(subject: Subject) -> Figure:
    """The factor of the logits over position."""
    assert subject.parts.logit_scale is not None
    ids = torch.logspace(0, 17, 400, base=2).round().long().unique() - 1
    scale: Tensor = subject.parts.logit_scale(Positions(ids.unsqueeze(0), torch.tensor([[_FAR]])))[0].float()
    figure, axes = line_figure(subject, by_head(scale), ids + 1, "tokens up to the query", "factor of the logits")
    axes.set_xscale("log", base=2)
    return figure
