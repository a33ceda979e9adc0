"""Where a position map puts the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import POSITION_LABEL, legend_below, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS, DASHES
from hf_posenc.schemes.position_maps.mapped import PositionMap

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


def _applies(subject: Subject) -> bool:
    return bool(_maps(subject))


def _draw(subject: Subject) -> Figure:
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


def _caption(subject: Subject) -> str:
    length = _length(subject)
    names = [name for name, _ in mapped_positions(subject, length)]
    words = f"Where each of {length} tokens stands after the position map"
    if any("training" in name for name in names):
        words += f" (two random draws, seeds {INPUT_SEED} and {INPUT_SEED + 1})"
    return words + "."


KIND = FigureKind("position_map", "the position of each token after a position map", _applies, _draw, _caption)
