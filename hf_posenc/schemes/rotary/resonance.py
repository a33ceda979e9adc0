"""RoPE with whole wavelengths (Resonance RoPE)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.rotary.rope import RopeConfig, RotaryConfig, RotaryMap
from hf_posenc.schemes.rotary.scaling import RopeScaling, check_scaling
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme


def resonant(inverse_frequencies: Tensor) -> Tensor:
    """Rounds the wavelengths of frequencies to whole positions; a frequency of zero stays zero."""
    return 2 * math.pi / (2 * math.pi / inverse_frequencies).round().clamp(min=1.0)


@dataclass(frozen=True)
class ResonanceScaling(RopeScaling):
    """Integer wavelengths (arXiv:2403.00071, section 4.1): `w -> 2 pi / round(2 pi / w)`, after another scaling or
    alone.

    Args:
        scaling: the scaling to round; `None` for RoPE's own frequencies.
    """

    type: ClassVar[str] = "resonance"

    scaling: RopeScaling | None = option(None, check_scaling)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scaling, ResonanceScaling):
            # Integer wavelengths do not change.
            object.__setattr__(self, "scaling", self.scaling.scaling)

    @property
    def _inner(self) -> RopeScaling:
        return self.scaling or RopeScaling()

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        """Whether the frequencies depend on the length of the sequence."""
        return self._inner.length_dependent

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the rounded spectrum, or the constants of a length-dependent scaling."""
        constants = self._inner.constants(theta, rotary_dim)
        return constants if self.length_dependent else resonant(constants)

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """Broadcasts to `(*lengths.shape, d/2)`."""
        frequencies = self._inner.at_lengths(constants, theta, rotary_dim, lengths)
        return resonant(frequencies) if self.length_dependent else frequencies

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """Returns the attention scaling of the inner scaling."""
        return self._inner.attention_scaling(max_positions)

    def made_for(self, native_length: int | None) -> int | None:
        """Returns the length that the inner scaling is made for."""
        return self._inner.made_for(native_length)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Applies the check of the inner scaling."""
        self._inner.check_cache(cached_length, total_length)


@register_scheme
class ResonanceConfig(RotaryConfig):
    """RoPE in which every pair has an integer wavelength (Resonance RoPE, arXiv:2403.00071, section 4.1).

    Pair `m`, of `w[m]` radians per position in RoPE or after a scaling, turns by::

        2 pi / round(2 pi / w[m])    radians per position

    so that for a pair with a wavelength within the training length, longer sequences have only angles that occurred
    exactly in training. Equivalent to `RopeConfig(scaling=ResonanceScaling(scaling))`.

    Args:
        theta: the base.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
        scaling: a scaling applied before rounding (YaRN in the paper), as in `RopeConfig`.
    """

    name: ClassVar[str] = "resonance"

    theta: float = 10000.0
    rotary_dim: int | None = None
    layout: str = "auto"
    scaling: RopeScaling | None = option(None, check_scaling)

    def rotation(self, context: BuildContext) -> RotaryMap:
        """The rotation of the equivalent `RopeConfig`."""
        scaling = ResonanceScaling(self.scaling)
        return RopeConfig(self.theta, self.rotary_dim, layout=self.layout, scaling=scaling).rotation(context)
