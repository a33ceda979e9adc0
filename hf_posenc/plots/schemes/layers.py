"""Which layer has which scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posenc.plots.schemes.drawing import panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.subject import Subject, shortened
from hf_posenc.plots.style import COLORS
from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.labels import scheme_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYERS = 12
_PERIOD = 4


def _applies(subject: Subject) -> bool:
    return isinstance(subject.config, LayeredConfig)


def layer_type(layer: int) -> str:
    """The example's pattern: three layers with a sliding window, then one that sees everything."""
    return "full_attention" if (layer + 1) % _PERIOD == 0 else "sliding_attention"


def _layer_schemes(subject: Subject) -> list[str]:
    config = subject.config
    assert isinstance(config, LayeredConfig)
    count = len(config.layers) if isinstance(config, ScheduleConfig) else _LAYERS
    return [scheme_label(config.for_layer(layer, layer_type(layer))) for layer in range(count)]


def _draw(subject: Subject) -> Figure:
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


def _caption(subject: Subject) -> str:
    if isinstance(subject.config, ScheduleConfig):
        return "The scheme of every layer of the example."
    return (
        f"The scheme of every layer in a model of {_LAYERS} layers, in which every {_PERIOD}th layer has full "
        "attention and the others a sliding window."
    )


KIND = FigureKind("layers", "which layer has which scheme", _applies, _draw, _caption)
