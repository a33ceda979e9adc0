"""RoPE with whole wavelengths (Resonance RoPE)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.rotary.rope import RotaryConfig
from hf_posenc.schemes.rotary.scaling import OuterScaling, RopeScaling, check_scaling
from hf_posenc.schemes.scheme import option, register_scheme


@dataclass(frozen=True)
class ResonanceScaling(OuterScaling):
    """Integer wavelengths (arXiv:2403.00071, section 4.1): `w -> 2 pi / round(2 pi / w)`, alone or after a scaling.

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

    def changed(self, frequencies: Tensor, theta: float) -> Tensor:
        """`(..., d/2)`; a frequency of zero stays zero."""
        return 2 * math.pi / (2 * math.pi / frequencies).round().clamp(min=1.0)


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

    @property
    def applied_scaling(self) -> RopeScaling:
        """The scaling of the equivalent `RopeConfig`."""
        return ResonanceScaling(self.scaling)
