"""The frequencies of a rotation, before and after what the scheme does to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import chosen, legend_below, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import turning_frequencies
from hf_posenc.plots.schemes.subject import Subject
from hf_posenc.plots.style import COLORS
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTHS = (512, 4096, 32768)
_LOOKS = (("o", "solid"), ("s", (0, (5, 2))), ("D", (0, (1, 1.2))), ("^", (0, (6, 2, 1, 2))))


def _applies(subject: Subject) -> bool:
    return turning_frequencies(subject, _LENGTHS[0]) is not None


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


def _draw(subject: Subject) -> Figure:
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


def _wavelength(frequency: Any) -> Any:
    """`2 pi / frequency`, its own inverse."""
    import numpy

    with numpy.errstate(divide="ignore"):
        return 2 * torch.pi / numpy.asarray(frequency)


def _caption(subject: Subject) -> str:
    if not changed_spectra(subject):
        return "The frequency and the wavelength of every pair of dimensions."
    return "The frequency and the wavelength of every pair of dimensions, beside those of RoPE with the same base."


KIND = FigureKind("frequencies", "frequencies of a rotation before and after scaling", _applies, _draw, _caption)
