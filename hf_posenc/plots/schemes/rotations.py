"""Rotations: turning pairs, and their frequencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError
from hf_posenc.plots.schemes.drawing import FigureKind, chosen, legend_below, panels
from hf_posenc.plots.schemes.probes import mapped_vectors, random_query, turning_frequencies
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS, SEQUENTIAL_MAP
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTH = 256
_SHOWN_POSITIONS = 16
_PANELS = 4
#: How far the logarithm of a pair's squared length may be from a straight line over position.
_STEADY = 1e-3
#: The least change of a component that is not the rounding of float32, as a share of the largest component.
_MOVES = 2e-6
#: Binary logarithms of how far to look for pairs, the farthest first: float32 counts to 2 ** 24, and maps whose factors
#: grow with position end earlier.
_REACHES = (24, 14, 8)
#: Radians per position below which one step is measured to a few digits only.
_SLOW = 1e-4


def turning_pairs(subject: Subject) -> list[tuple[int, int]]:
    """The pairs of dimensions that turn as position grows, from the first dimension on.

    A rotation that says how it pairs dimensions is believed; of any other map the partner of a dimension is the one
    with which the length of one random query stays the same best. Either way a pair counts only if it moves, and its
    length is constant, or grows or shrinks exponentially.
    """
    ids, vectors = _widely_spread(subject)
    spread = _unsteadiness(ids, vectors)
    part = subject.parts.query_key_map
    if isinstance(part, RotaryMap):
        declared = zip(_declared_pairs(part), _declared_speeds(part, subject), strict=True)
        return sorted(pair for pair, speed in declared if speed and spread[pair] < _STEADY)
    moving = (vectors - vectors[0]).abs().amax(0) > _MOVES * vectors[0].abs().amax()
    spread[:, ~moving] = torch.inf
    partner = spread.argmin(1).tolist()
    return [
        (first, second)
        for first, second in enumerate(partner)
        if first < second and moving[first] and partner[second] == first and spread[first, second] < _STEADY
    ]


def _declared_pairs(part: RotaryMap) -> list[tuple[int, int]]:
    pairs = range(part.rotary_dim // 2)
    if part.layout == "interleaved":
        return [(2 * pair, 2 * pair + 1) for pair in pairs]
    return [(pair, pair + part.rotary_dim // 2) for pair in pairs]


def _declared_speeds(part: RotaryMap, subject: Subject) -> list[float]:
    """Radians per position of each pair of the first head, without sign; 0 where it does not turn."""
    with torch.no_grad():
        angles = part.angles(subject.positions(_LENGTH))[0].double()
    steps = (angles if angles.ndim == 2 else angles[:, 0]).diff(dim=0).abs()
    return [_typical(pair[:_SHOWN_POSITIONS]) or _typical(pair) for pair in steps.unbind(1)]


def _typical(steps: Tensor) -> float:
    """The median of the steps that turn: a map of positions may let some tokens share one."""
    turning = steps[steps != 0].abs()
    return float(turning.median()) if turning.numel() else 0.0


def _widely_spread(subject: Subject) -> tuple[Tensor, Tensor]:
    """Positions from 0 to as far as the map goes, and one query there: `(count,)` and `(count, width)` float64.

    Near positions do not tell slow pairs apart: what turns by little is as good as straight.
    """
    part, query = subject.parts.query_key_map, random_query(subject)
    assert part is not None
    for exponent in _REACHES:
        far = torch.logspace(5, exponent, 192, base=2, dtype=torch.float64).round().long()
        ids = torch.cat((torch.arange(32), far)).unique()
        token_ids = subject.positions(ids.shape[0]).token_ids
        positions = Positions(ids.unsqueeze(0), torch.tensor([[_LENGTH]]), token_ids=token_ids)
        repeated = query.expand(1, subject.context.num_heads, ids.shape[0], query.shape[-1])
        try:
            with torch.no_grad():
                vectors = part.map_query(repeated, part.phases(positions))[0, 0].double()
        except SequenceLengthError:
            continue
        if vectors.isfinite().all():
            return ids, vectors
    near = mapped_vectors(subject, query, _LENGTH).double()
    return torch.arange(_LENGTH), near


def _unsteadiness(ids: Tensor, vectors: Tensor) -> Tensor:
    """`(width, width)`: how far the logarithm of each pair's squared length is from a straight line over position."""
    squares = vectors.square()
    logarithms = (squares.unsqueeze(2) + squares.unsqueeze(1)).clamp(min=1e-300).log()
    logarithms = logarithms - logarithms.mean(0)
    time = ids.double() - ids.double().mean()
    slope = torch.einsum("t,tab->ab", time, logarithms) / time.square().sum()
    spread = (logarithms - time[:, None, None] * slope).abs().amax(0)
    spread.fill_diagonal_(torch.inf)
    return spread


def turning_speeds(subject: Subject, pairs: list[tuple[int, int]]) -> list[float]:
    """Radians per position of each pair, without sign: what the map says, or else the median of its first steps."""
    part = subject.parts.query_key_map
    if isinstance(part, RotaryMap):
        by_pair = dict(zip(_declared_pairs(part), _declared_speeds(part, subject), strict=True))
        return [by_pair[pair] for pair in pairs]
    vectors = mapped_vectors(subject, random_query(subject), _LENGTH).double()
    return [_measured_speed(vectors[:, list(pair)]) for pair in pairs]


def _measured_speed(pair: Tensor) -> float:
    step = torch.atan2(pair[:, 1], pair[:, 0]).diff()
    step = torch.atan2(step.sin(), step.cos())
    typical = _typical(step[:_SHOWN_POSITIONS]) or _typical(step)
    # float32 rounds components by 1e-7, which counts where one step is hardly more.
    return float(step[step != 0].mean().abs()) if typical < _SLOW else typical


class Rotation(FigureKind):
    """Pairs of dimensions of one query, turning with position."""

    name = "rotation"
    summary = "pairs of dimensions of one query, turning with position"

    def applies(self, subject: Subject) -> bool:
        """Whether two pairs or more turn."""
        return subject.parts.query_key_map is not None and len(turning_pairs(subject)) > 1

    def draw(self, subject: Subject) -> Figure:
        """A circle for each of a few pairs."""
        vectors = mapped_vectors(subject, random_query(subject), _LENGTH)
        pairs = turning_pairs(subject)
        ordered = sorted(
            zip(turning_speeds(subject, pairs), pairs, strict=True), key=lambda found: (-found[0], found[1])
        )
        shown = [ordered[index] for index in chosen(len(ordered), _PANELS)]
        figure, axes = panels(subject.title, 1, len(shown), 2.35, 2.75, sharex=True, sharey=True)
        steps = torch.arange(_SHOWN_POSITIONS).numpy()
        for panel, (speed, pair) in zip(axes, shown, strict=True):
            turning = vectors[:, list(pair)]
            turning = turning / turning[0].norm()
            circle = torch.linspace(0, 2 * torch.pi, 100)
            panel.plot(circle.cos().numpy(), circle.sin().numpy(), color="0.8", linewidth=0.8, zorder=1)
            first, last = turning[:_SHOWN_POSITIONS].T.numpy()
            for x, y in zip(first.tolist(), last.tolist(), strict=True):
                panel.plot([0, x], [0, y], color="0.75", linewidth=0.6, zorder=1)
            points = panel.scatter(first, last, c=steps, cmap=SEQUENTIAL_MAP, s=26, zorder=3, edgecolors="none")
            panel.scatter(first[:1], last[:1], s=70, facecolors="none", edgecolors="#D55E00", linewidths=1.4, zorder=4)
            panel.set_aspect("equal")
            reach = max(1.25, float(turning[:_SHOWN_POSITIONS].norm(dim=1).max()) * 1.1)
            panel.set_xlim(-reach, reach)
            panel.set_ylim(-reach, reach)
            panel.set_title(f"dimensions {pair[0]} and {pair[1]}\n{speed:.2g} rad per position", fontsize=9)
            panel.set_xticks([-1, 0, 1])
            panel.set_yticks([-1, 0, 1])
        colorbar = figure.colorbar(points, ax=axes, label="position", pad=0.01, shrink=0.8)
        colorbar.set_ticks([0.0, 5.0, 10.0, 15.0])
        return figure

    def caption(self, subject: Subject) -> str:
        """With the query and the positions."""
        return (
            f"Pairs of dimensions of one random query (seed {INPUT_SEED}) at positions 0 to {_SHOWN_POSITIONS - 1}, "
            "from the fastest to the slowest pair; each pair is drawn with length 1, and a ring marks position 0."
        )


_LENGTHS = (512, 4096, 32768)
_LOOKS = (("o", "solid"), ("s", (0, (5, 2))), ("D", (0, (1, 1.2))), ("^", (0, (6, 2, 1, 2))))


def plain_frequencies(subject: Subject) -> Tensor:
    """`(pairs,)`: RoPE's own frequencies for the base and the number of pairs of this scheme."""
    frequencies = turning_frequencies(subject, _LENGTHS[0])
    assert frequencies is not None
    base = getattr(subject.config, "theta", None)
    return rope_inverse_frequencies(base if isinstance(base, int | float) else 10000.0, 2 * frequencies.shape[-1])


def changed_spectra(subject: Subject) -> list[tuple[str, Tensor]]:
    """The scheme's spectra that differ from RoPE's and from each other, named; by length, by head or by axis."""
    plain = plain_frequencies(subject)
    spectra: list[tuple[str, Tensor]] = []
    for length in _LENGTHS:
        found = turning_frequencies(subject, length)
        assert found is not None
        for row in chosen(found.shape[0], 3):
            known = [plain, *(spectrum for _, spectrum in spectra)]
            if not any(torch.allclose(found[row], spectrum, rtol=1e-4, atol=1e-9) for spectrum in known):
                name = "this scheme" if found.shape[0] == 1 else f"{_row_word(subject)} {row + 1} of {found.shape[0]}"
                spectra.append((name if length == _LENGTHS[0] else f"at {length} tokens", found[row]))
    return spectra[: len(_LOOKS)]


def _row_word(subject: Subject) -> str:
    part = subject.parts.query_key_map
    return "axis" if part is not None and part.reads_coordinates else "head"


def _wavelength(frequency: Any) -> Any:
    """`2 pi / frequency`, its own inverse."""
    import numpy

    with numpy.errstate(divide="ignore"):
        return 2 * torch.pi / numpy.asarray(frequency)


class Frequencies(FigureKind):
    """The frequencies of a rotation, before and after what the scheme does to them."""

    name = "frequencies"
    summary = "frequencies of a rotation before and after scaling"

    def applies(self, subject: Subject) -> bool:
        """Whether the map tells its frequencies."""
        return turning_frequencies(subject, _LENGTHS[0]) is not None

    def draw(self, subject: Subject) -> Figure:
        """Spectra on a logarithmic axis."""
        plain, spectra = plain_frequencies(subject), changed_spectra(subject)
        positive = torch.cat([spectrum[spectrum > 0] for spectrum in (plain, *(found for _, found in spectra))])
        floor = float(positive.min()) / 3
        figure, (axes,) = panels(subject.title, 1, 1, 6.2, 3.4)
        pairs = range(plain.shape[0])
        name = "RoPE, same base" if spectra else "RoPE"
        axes.plot(
            pairs,
            plain.numpy(),
            label=name,
            **({"color": "0.5", "linewidth": 1.4, "marker": "."} if spectra else {"color": COLORS[0], "marker": "o"}),
        )
        stopped = False
        for index, (label, spectrum) in enumerate(spectra):
            marker, dashes = _LOOKS[index]
            heights = spectrum.abs().clamp(min=floor)
            axes.plot(
                pairs, heights.numpy(), color=COLORS[index], label=label, marker=marker, linestyle=dashes, markersize=4
            )
            stopped = stopped or bool((spectrum == 0).any())
        axes.set_yscale("log")
        axes.set_xlabel("pair of dimensions")
        axes.set_ylabel("frequency (radians per position)")
        if stopped:
            axes.axhline(floor, color="0.6", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1, label="0: does not turn")
        other = axes.secondary_yaxis("right", functions=(_wavelength, _wavelength))
        other.set_ylabel("wavelength (tokens)")
        legend_below(figure, axes)
        return figure

    def caption(self, subject: Subject) -> str:
        """What is beside it."""
        if not changed_spectra(subject):
            return "The frequency and the wavelength of every pair of dimensions."
        return "The frequency and the wavelength of every pair of dimensions, beside those of RoPE with the same base."
