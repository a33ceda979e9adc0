"""Where tokens and layers are put: position maps, distances, the schemes of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import POSITION_LABEL, FigureKind, legend_below, panels
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject, shortened
from hf_posenc.plots.style import COLORS, DASHES
from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.position_maps.mapped import PositionMap
from hf_posenc.schemes.position_maps.pairwise import FarPositions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Lengths that are tried until one shows the map.
_LENGTHS = (128, 512, 2048)
_DRAWS = 2


def _maps(subject: Subject) -> list[tuple[str, PositionMap]]:
    """The position maps inside the parts, with what gets their positions."""
    parts = subject.parts
    owners = (
        ("added vectors", parts.additive),
        ("queries and keys", parts.query_key_map),
        ("bias", parts.logit_bias),
        ("logit scale", parts.logit_scale),
    )
    return [
        (name, module)
        for name, part in owners
        if part is not None
        for module in part.modules()
        if isinstance(module, PositionMap)
    ]


def mapped_positions(subject: Subject, length: int) -> list[tuple[str, Tensor]]:
    """The distinct maps of positions `0 .. length - 1`, named: `(length,)` each, those drawn in training apart."""
    lines: list[tuple[str, Tensor]] = []
    for owner, position_map in _maps(subject):
        ids = position_map(subject.positions(length))[0]
        drawn = [_in_training(subject, position_map, length, draw) for draw in range(_DRAWS)]
        if torch.equal(drawn[0], drawn[1]):
            candidates = [(owner, ids)]
        else:
            candidates = [("outside training", ids)]
            candidates += [(f"in training, draw {draw + 1}", line) for draw, line in enumerate(drawn)]
        lines += [(name, line) for name, line in candidates if not any(torch.equal(line, known) for _, known in lines)]
    return [("every part", lines[0][1])] if len(lines) == 1 else lines


def _in_training(subject: Subject, position_map: PositionMap, length: int, draw: int) -> Tensor:
    was_training = position_map.training
    position_map.train()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(INPUT_SEED + draw)
            mapped: Tensor = position_map(subject.positions(length))[0]
    finally:
        position_map.train(was_training)
    return mapped


def _length(subject: Subject) -> int:
    for length in _LENGTHS:
        if any(not torch.equal(line, torch.arange(length)) for _, line in mapped_positions(subject, length)):
            return length
    return _LENGTHS[-1]


class PositionMapFigure(FigureKind):
    """Where a position map puts the tokens."""

    name = "position_map"
    summary = "the position of each token after a position map"

    def applies(self, subject: Subject) -> bool:
        """Whether a part holds a position map."""
        return bool(_maps(subject))

    def draw(self, subject: Subject) -> Figure:
        """A line for each map, and each draw in training."""
        length = _length(subject)
        figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.5)
        axes.plot([0, length - 1], [0, length - 1], color="0.6", linewidth=1, linestyle=(0, (2, 2)), label="unchanged")
        for index, (name, line) in enumerate(mapped_positions(subject, length)):
            axes.plot(line.numpy(), color=COLORS[index], linestyle=DASHES[index % len(DASHES)], label=name)
        axes.set_xlabel(POSITION_LABEL)
        axes.set_ylabel("position after the map")
        axes.margins(x=0.01)
        legend_below(figure, axes)
        return figure

    def caption(self, subject: Subject) -> str:
        """With the number of tokens."""
        length = _length(subject)
        names = [name for name, _ in mapped_positions(subject, length)]
        words = f"Where each of {length} tokens stands after the position map"
        if any("training" in name for name in names):
            words += f" (two random draws, seeds {INPUT_SEED} and {INPUT_SEED + 1})"
        return words + "."


_WINDOWS_SHOWN = 4


def _far_positions(subject: Subject) -> FarPositions | None:
    found = (getattr(module, "far", None) for part in subject.parts for module in part.modules())
    return next((far for far in found if isinstance(far, FarPositions)), None)


def mapped_distances(far: FarPositions, length: int) -> Tensor:
    """`(length,)`: the distance the scheme gives to a key `0 .. length - 1` tokens before the query.

    The query stands at `length - 1`.
    """
    distance = torch.arange(length)
    query = torch.tensor(length - 1)
    return (far.query(query) - far.key(query - distance)).where(distance >= far.window, distance)


class DistanceMap(FigureKind):
    """How far apart a pairwise position map puts query and key."""

    name = "distance_map"
    summary = "the distance of each pair after a pairwise position map"

    def applies(self, subject: Subject) -> bool:
        """Whether a part holds a pairwise position map."""
        return _far_positions(subject) is not None

    def draw(self, subject: Subject) -> Figure:
        """The distance after the map over that before."""
        far = _far_positions(subject)
        assert far is not None
        length = _WINDOWS_SHOWN * far.window
        figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.5)
        axes.plot([0, length - 1], [0, length - 1], color="0.6", linewidth=1, linestyle=(0, (2, 2)), label="unchanged")
        axes.plot(mapped_distances(far, length).numpy(), color=COLORS[0], label="this scheme")
        axes.axvline(far.window, color=COLORS[1], linewidth=1, linestyle=(0, (5, 2)), label="window")
        axes.set_xlabel("distance from query back to key (tokens)")
        axes.set_ylabel("distance after the map")
        axes.margins(x=0.01)
        legend_below(figure, axes)
        return figure

    def caption(self, subject: Subject) -> str:
        """What the axes are."""
        return (
            "The distance at which the scheme sees a key, over its distance from the query; keys past the window are "
            "far."
        )


_LAYERS = 12
_PERIOD = 4


def layer_type(layer: int) -> str:
    """The example's pattern: three layers with a sliding window, then one that sees everything."""
    return "full_attention" if (layer + 1) % _PERIOD == 0 else "sliding_attention"


def _layer_schemes(subject: Subject) -> list[str]:
    config = subject.config
    assert isinstance(config, LayeredConfig)
    count = len(config.layers) if isinstance(config, ScheduleConfig) else _LAYERS
    return [scheme_label(config.for_layer(layer, layer_type(layer))) for layer in range(count)]


class Layers(FigureKind):
    """Which layer has which scheme."""

    name = "layers"
    summary = "which layer has which scheme"

    def applies(self, subject: Subject) -> bool:
        """Whether layers differ."""
        return isinstance(subject.config, LayeredConfig)

    def draw(self, subject: Subject) -> Figure:
        """A bar for each layer in the row of its scheme."""
        schemes = _layer_schemes(subject)
        names = list(dict.fromkeys(schemes))
        figure, (axes,) = panels(subject.config.name, 1, 1, 6.6, 0.9 + 0.42 * len(names))
        for layer, scheme in enumerate(schemes):
            row = names.index(scheme)
            axes.barh(row, 0.9, left=layer - 0.45, height=0.7, color=COLORS[row % len(COLORS)])
        axes.set_yticks(range(len(names)), [shortened(name, 40) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xticks(range(len(schemes)))
        axes.set_xlim(-0.6, len(schemes) - 0.4)
        axes.set_xlabel("layer")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        return figure

    def caption(self, subject: Subject) -> str:
        """With the layers of the example."""
        if isinstance(subject.config, ScheduleConfig):
            return "The scheme of every layer of the example."
        return (
            f"The scheme of every layer in a model of {_LAYERS} layers, in which every {_PERIOD}th layer has full "
            "attention and the others a sliding window."
        )
