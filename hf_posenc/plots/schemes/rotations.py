"""Figures of rotations: pairs of dimensions that turn, and their frequencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.metrics.statistics import spread
from hf_posenc.plots.schemes.drawing import figure_kind, legend_below, panels
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject, mapped_vectors, random_query, turning_frequencies
from hf_posenc.plots.style import HIGHLIGHT, SEQUENTIAL_MAP, palette, shade
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 256
_SHOWN_POSITIONS = 16
_PANELS = 4
#: A slow pair is drawn at this many places per turn, which are at most this many tokens apart.
_PLACES_OF_TURN, _LARGEST_STEP = 20, 2048
#: Radians per position below which a single step is only accurate to a few digits.
_SLOW = 1e-4
#: Lengths of the sequences for which frequencies are compared.
_LENGTHS = (512, 4096, 32768)


def turning_pairs(subject: Subject) -> list[tuple[float, tuple[int, int]]]:
    """Returns the pairs of dimensions that turn with position, fastest first, with absolute radians per position.

    The pairs are those of the rotation inside the map. Their speed is measured on one random query, because a map
    around the rotation may change its positions.
    """
    part = subject.parts.query_key_map
    rotations = [] if part is None else [module for module in part.modules() if isinstance(module, RotaryMap)]
    if not rotations:
        return []
    count = rotations[0].rotary_dim // 2
    interleaved = rotations[0].layout == "interleaved"
    pairs = [(2 * pair, 2 * pair + 1) if interleaved else (pair, pair + count) for pair in range(count)]
    vectors = mapped_vectors(subject, random_query(subject), _LENGTH).double()
    speeds = [_speed(vectors[:, list(pair)]) for pair in pairs]
    return sorted(((s, pair) for s, pair in zip(speeds, pairs, strict=True) if s), key=lambda turn: (-turn[0], turn[1]))


def _speed(pair: Tensor) -> float:
    """Returns the speed of a turning vector `(positions, 2)`, in radians per position."""
    step = torch.atan2(pair[:, 1], pair[:, 0]).diff()
    step = torch.atan2(step.sin(), step.cos())
    turning = step[:_SHOWN_POSITIONS][step[:_SHOWN_POSITIONS] != 0]
    typical = float(turning.abs().median()) if turning.numel() else 0.0
    # float32 rounds components by 1e-7, which matters if a step is hardly larger. A position map may also give many
    # tokens the same position.
    return typical if typical >= _SLOW else float(step.sum().abs() / len(step))


@figure_kind(
    lambda subject: len(turning_pairs(subject)) > 1,
    f"Four pairs of dimensions of one random query (seed {INPUT_SEED}), from the fastest to the slowest, each at "
    f"{_SHOWN_POSITIONS} positions. The red ring marks position 0, and the colours run to the last position. Slow "
    "pairs are drawn at positions far apart, because they hardly move from one token to the next. Fast pairs "
    "distinguish neighbours, and slow pairs distinguish distant positions.",
)
def rotation(subject: Subject) -> Figure:
    """Pairs of dimensions of one query, turning with position."""
    # A circle for each of a few pairs, over as many positions as it needs to turn.
    shown = spread(turning_pairs(subject), _PANELS)
    figure, axes = panels(subject.title, -(-len(shown) // 2), min(2, len(shown)), 2.9, sharex=True, sharey=True)
    circle = torch.linspace(0, 2 * torch.pi, 100)
    for panel, (speed, pair) in zip(axes, shown, strict=False):
        turn = 2 * torch.pi / speed
        step = min(max(1, round(turn / _PLACES_OF_TURN)), _LARGEST_STEP)
        vectors = mapped_vectors(subject, random_query(subject), _SHOWN_POSITIONS, step)
        x, y = (vectors[:, list(pair)] / vectors[0, list(pair)].norm()).T.numpy()
        panel.plot(circle.cos().numpy(), circle.sin().numpy(), color=shade(0.25), linewidth=0.8, zorder=1)
        panel.plot([0 * x, x], [0 * y, y], color=shade(0.3), linewidth=0.6, zorder=1)
        points = panel.scatter(
            x, y, c=range(_SHOWN_POSITIONS), cmap=SEQUENTIAL_MAP, s=30, zorder=3, linewidths=0.5, edgecolors=shade(0.5)
        )
        panel.scatter(x[:1], y[:1], s=90, facecolors="none", edgecolors=HIGHLIGHT, linewidths=1.6, zorder=4)
        panel.grid(visible=False)
        reach = max(1.25, 1.1 * float(abs(x).max()), 1.1 * float(abs(y).max()))
        panel.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
        panel.set_title(f"dimensions {pair[0]} and {pair[1]}\na turn in {float(f'{turn:.3g}'):,.0f} tokens", fontsize=9)
        every = "every token" if step == 1 else f"every {step:,} tokens"
        panel.set_xlabel(f"positions 0 to {step * (_SHOWN_POSITIONS - 1):,},\n{every}", fontsize=9)
    for panel in axes[len(shown) :]:
        panel.set_visible(False)
    bar = figure.colorbar(points, ax=axes, pad=0.02, shrink=0.6, ticks=[0, _SHOWN_POSITIONS - 1])
    bar.ax.set_yticklabels(["first", "last"])
    return figure


def plain_frequencies(subject: Subject) -> Tensor:
    """`(pairs,)`: the frequencies of plain RoPE with the base and the number of pairs of this scheme."""
    frequencies = turning_frequencies(subject, _LENGTHS[0])
    assert frequencies is not None
    base = getattr(subject.config, "theta", None)
    return rope_inverse_frequencies(base if isinstance(base, int | float) else 10000.0, 2 * frequencies.shape[-1])


def changed_spectra(subject: Subject) -> dict[str, Tensor]:
    """Returns up to four spectra that differ from RoPE's and from each other, by length, by head or by axis."""
    known, spectra = [plain_frequencies(subject)], {}
    part = subject.parts.query_key_map
    row_word = "axis" if part is not None and part.reads_coordinates else "head"
    for length in _LENGTHS:
        rates = turning_frequencies(subject, length)
        assert rates is not None
        for row in spread(range(rates.shape[0]), 3):
            if not any(torch.allclose(rates[row], spectrum, rtol=1e-4, atol=1e-9) for spectrum in known):
                name = "this scheme" if rates.shape[0] == 1 else f"{row_word} {row + 1} of {rates.shape[0]}"
                known.append(rates[row])
                spectra[name if length == _LENGTHS[0] else f"at {length} tokens"] = rates[row]
    return dict(list(spectra.items())[:4])


def _wavelength(frequency: Any) -> Any:
    """`2 pi / frequency`. The function is its own inverse."""
    import numpy

    with numpy.errstate(divide="ignore"):
        return 2 * torch.pi / numpy.asarray(frequency)


@figure_kind(
    lambda subject: turning_frequencies(subject, _LENGTHS[0]) is not None,
    "How fast each pair of dimensions turns with position (left axis), and the number of tokens of one full turn "
    "(right axis). RoPE with the same base is shown for comparison where it differs.",
)
def frequencies(subject: Subject) -> Figure:
    """How fast each pair of dimensions turns, before and after scaling."""
    # Spectra on a logarithmic axis.
    plain, spectra = plain_frequencies(subject), changed_spectra(subject)
    every = torch.stack([plain, *spectra.values()])
    floor = float(every[every > 0].min()) / 3
    figure, (axes,) = panels(subject.title, 1, 1, 3.4)
    look = {"color": shade(0.5), "linewidth": 1.4, "marker": "."} if spectra else {"color": palette()[0], "marker": "o"}
    axes.plot(plain.numpy(), label="RoPE, same base" if spectra else "RoPE", **look)
    for index, (name, spectrum) in enumerate(spectra.items()):
        style: dict[str, Any] = {"color": palette()[index], "marker": "osD^"[index], "markersize": 4}
        turning = spectrum.abs().where(spectrum != 0, torch.nan)
        axes.plot(turning.numpy(), label=name, linestyle="solid" if len(spectra) == 1 else "none", **style)
        stopped = torch.full_like(spectrum, floor).where(spectrum == 0, torch.nan)
        if len(spectra) == 1 and bool((spectrum == 0).any()):
            axes.plot(stopped.numpy(), label="does not turn", linestyle="none", **style | {"fillstyle": "none"})
    axes.set(yscale="log", xlabel="pair of dimensions", ylabel="speed (radians per token)")
    axes.secondary_yaxis("right", functions=(_wavelength, _wavelength)).set_ylabel("tokens per turn")
    legend_below(figure, axes)
    return figure
