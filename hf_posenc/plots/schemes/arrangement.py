"""Figures of arrangements: position maps, distances, and the schemes of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import DISTANCE_LABEL, POSITION_LABEL, figure_kind, line_figure, panels
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject, shortened
from hf_posenc.plots.style import palette
from hf_posenc.preserve import isolated_rng
from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.parts import PositionMap
from hf_posenc.schemes.position_maps.pairwise import FarPositionsConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Lengths to try until the map has an effect.
_LENGTHS = (128, 512, 2048)
#: A pairwise map is drawn up to this multiple of the distance to the first far pair.
_TIMES = 4
#: Number of layers of the example model, and the period of layers with full attention.
_LAYERS, _PERIOD = 12, 4


def _maps(subject: Subject) -> list[PositionMap]:
    return [module for part in subject.parts for module in part.modules() if isinstance(module, PositionMap)]


def mapped_positions(subject: Subject, length: int) -> dict[str, Tensor]:
    """Returns the distinct maps of positions `0 .. length - 1` by name, `(length,)` each, with two draws if random."""
    lines: dict[str, Tensor] = {}
    for position_map in _maps(subject):
        draws = []
        for draw in range(2):
            position_map.train()
            with isolated_rng(INPUT_SEED + draw):
                draws.append(position_map(subject.positions(length))[0])
            position_map.eval()
        after = position_map(subject.positions(length))[0]
        candidates = {"after the map": after}
        if not torch.equal(*draws):
            candidates = {"outside training": after, "in training, draw 1": draws[0], "in training, draw 2": draws[1]}
        for name, line in candidates.items():
            if not any(torch.equal(line, known) for known in lines.values()):
                lines[name if name not in lines else f"{name}, level {len(lines) + 1}"] = line
    return lines


@figure_kind(
    lambda subject: bool(_maps(subject)),
    "The position that the inner scheme receives, over the token's own position. A map that is random in training is "
    f"drawn twice (seeds {INPUT_SEED} and {INPUT_SEED + 1}).",
)
def position_map(subject: Subject) -> Figure:
    """The position of each token after a position map."""
    for length in _LENGTHS:
        lines, unchanged = mapped_positions(subject, length), torch.arange(length)
        if any(not torch.equal(line, unchanged) for line in lines.values()):
            break
    lines = {"unchanged": unchanged, **lines}
    return line_figure(subject, lines, unchanged, POSITION_LABEL, "position after the map")[0]


def _far_positions(subject: Subject) -> FarPositionsConfig | None:
    candidates = (getattr(module, "far", None) for part in subject.parts for module in part.modules())
    return next((far for far in candidates if isinstance(far, FarPositionsConfig)), None)


@figure_kind(
    lambda subject: _far_positions(subject) is not None,
    "The distance at which the scheme sees a key, over the key's own distance from the query. Near keys keep theirs. "
    "Where there is no line, keys are hidden.",
)
def distance_map(subject: Subject) -> Figure:
    """The distance of each pair after a pairwise position map."""
    # The query is the last token.
    far = _far_positions(subject)
    assert far is not None
    distance = torch.arange(_TIMES * far.first_query)
    mapped = -far.distance(distance[-1:], distance).squeeze(0).flip(0)
    mapped = mapped.float().masked_fill(far.are_hidden(distance[-1:], distance).squeeze(0).flip(0), torch.nan)
    lines = {"unchanged": distance, f"this scheme (far keys from position {far.first_query} on)": mapped}
    return line_figure(subject, lines, distance, DISTANCE_LABEL, "distance after the map")[0]


@figure_kind(
    lambda subject: isinstance(subject.config, LayeredConfig),
    f"The scheme of every layer. If it depends on the kind of attention, the figure assumes {_LAYERS} layers: every "
    f"{_PERIOD}th has full attention, and the others have a sliding window.",
)
def layers(subject: Subject) -> Figure:
    """Which layer has which scheme."""
    config = subject.config
    assert isinstance(config, LayeredConfig)
    count = len(config.layers) if isinstance(config, ScheduleConfig) else _LAYERS
    types = ["full_attention" if (layer + 1) % _PERIOD == 0 else "sliding_attention" for layer in range(count)]
    schemes = [config.for_layer(layer, kind).label for layer, kind in enumerate(types)]
    names = list(dict.fromkeys(schemes))
    figure, (axes,) = panels(config.name, 1, 1, 0.9 + 0.42 * len(names))
    rows = [names.index(scheme) for scheme in schemes]
    colors = [palette()[row % len(palette())] for row in rows]
    axes.barh(rows, 0.9, left=[layer - 0.45 for layer in range(len(rows))], height=0.7, color=colors)
    axes.set_yticks(range(len(names)), [shortened(name, 40) for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xticks=range(len(schemes)), xlabel="layer")
    axes.grid(visible=False)
    return figure
