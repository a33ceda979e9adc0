"""Scalings with the same frequencies at every length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.rotary.scaling.base import Factor, RopeScaling, rope_exponents, rope_inverse_frequencies
from hf_posenc.schemes.validation import SMALLEST_FACTOR, checked, option


@dataclass(frozen=True)
class LinearScaling(Factor, RopeScaling):
    """Position interpolation (arXiv:2306.15595, eq. 4): all frequencies divided by `s`.

    Args:
        factor: `s`, how many times longer the context becomes, at least 1.
    """

    type: ClassVar[str] = "linear"

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """`theta**(-2m/d) / s`."""
        return rope_inverse_frequencies(theta, rotary_dim) / self.factor


@dataclass(frozen=True)
class NtkScaling(Factor, RopeScaling):
    """NTK-aware scaling (described in arXiv:2309.00071, definition 1): the base becomes `theta * s**(d / (d - 2))`.

    Args:
        factor: `s`, how many times longer the context becomes, at least 1.
    """

    type: ClassVar[str] = "ntk"

    def stretched_theta(self, theta: float, rotary_dim: int) -> float:
        """Returns the new base.

        Raises:
            ValueError: for a rotary width of 2, for which the exponent is not defined.
        """
        return theta * float(self.factor) ** ntk_exponent(self, rotary_dim)

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the frequencies of the new base."""
        return rope_inverse_frequencies(self.stretched_theta(theta, rotary_dim), rotary_dim)


class YarnRamp(RopeScaling):
    """Base class of YaRN and dynamic YaRN: how much of each frequency is kept. Each declares the options itself."""

    original_max_positions: int
    beta_fast: float
    beta_slow: float
    #: Whether the ends of the ramp are rounded outwards to whole pairs.
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"{type(self).__name__}.beta_fast is {self.beta_fast}; expected more than beta_slow={self.beta_slow}: "
                "pairs that turn faster than beta_fast are kept, and those slower than beta_slow are divided."
            )

    def ramp(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the wavelengths `theta**(2m / d)` and the kept shares, `(2, d/2)` float32.

        Raises:
            ValueError: for a `theta` of at most 1.
        """
        if theta <= 1:
            name = type(self).__name__
            raise ValueError(f"{name} needs theta greater than 1, got {theta}: its ramp divides by ln(theta).")
        low = self._pair_with_turns(self.beta_fast, theta, rotary_dim)
        high = self._pair_with_turns(self.beta_slow, theta, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return torch.stack((theta ** rope_exponents(rotary_dim), kept))

    def _pair_with_turns(self, turns: float, theta: float, rotary_dim: int) -> float:
        """Returns the (fractional) index of the pair with this number of turns within the original length."""
        ratio = self.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(theta))


def divided(ramp: Tensor, factor: Tensor | float) -> Tensor:
    """Returns the frequencies of YaRN, `(..., d/2)`, for a ramp and a factor `(..., 1)`."""
    wavelengths, kept = ramp
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


@dataclass(frozen=True)
class YarnScaling(Factor, YarnRamp):
    """YaRN (arXiv:2309.00071, section 3.4): keeps high frequencies, divides low ones by `s`, with a ramp in between.

    As in the authors' code and transformers, the ramp is linear in the pair index, between the (rounded) indices at
    which a pair makes `beta_fast` and `beta_slow` turns within `L`; the paper's eq. 13 has it linear in the number of
    turns. Cosine and sine are multiplied by `0.1 ln(s) + 1`.

    Args:
        factor: `s`, how many times longer the context becomes, at least 1.
        original_max_positions: `L`, the length that the model was trained on, in tokens.
        beta_fast: number of turns within `L` above which a frequency is kept.
        beta_slow: number of turns within `L` below which a frequency is divided by `s`.
        attention_factor: the factor of cosine and sine; by default the paper's formula.
        mscale: with `mscale_all_dim`, the factor is `(0.1 mscale ln(s) + 1) / (0.1 mscale_all_dim ln(s) + 1)`
            (DeepSeek-V2); if either is missing or 0, the paper's formula.
        mscale_all_dim: see `mscale`.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
    """

    type: ClassVar[str] = "yarn"

    original_max_positions: int = field(metadata=checked(minimum=1))
    beta_fast: float = option(32.0, minimum=SMALLEST_FACTOR)
    beta_slow: float = option(1.0, minimum=SMALLEST_FACTOR)
    attention_factor: float | None = option(None, minimum=SMALLEST_FACTOR)
    mscale: float | None = option(None, minimum=0)
    mscale_all_dim: float | None = option(None, minimum=0)
    truncate: bool = option(True)

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the interpolated frequencies."""
        return divided(self.ramp(theta, rotary_dim), self.factor)

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """Returns `attention_factor`, the factor from `mscale` and `mscale_all_dim`, or `0.1 ln(s) + 1`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Llama3Scaling(Factor, RopeScaling):
    """Llama 3.1's scaling: NTK-by-parts (arXiv:2309.00071, definition 2), linear in the number of turns.

    Let `r` be the number of turns of a pair within `L`. Its frequency is kept for `r > high_freq_factor`, divided by
    `s` for `r < low_freq_factor`, and interpolated linearly in `r` in between.

    Args:
        factor: `s`, how many times longer the context becomes, at least 1.
        low_freq_factor: number of turns below which a frequency is divided by `s`.
        high_freq_factor: number of turns above which a frequency is kept.
        original_max_positions: `L`, the length that the model was trained on, in tokens.
    """

    type: ClassVar[str] = "llama3"

    low_freq_factor: float = option(1.0, minimum=SMALLEST_FACTOR)
    high_freq_factor: float = option(4.0, minimum=SMALLEST_FACTOR)
    original_max_positions: int = option(8192, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor is {self.high_freq_factor}; expected more than "
                f"low_freq_factor={self.low_freq_factor}, because the frequencies between them are blended."
            )

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the interpolated frequencies."""
        plain = rope_inverse_frequencies(theta, rotary_dim)
        wavelength = 2 * math.pi / plain
        turns = self.original_max_positions / wavelength
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * plain / self.factor + blend * plain
        slow = wavelength > self.original_max_positions / self.low_freq_factor
        fast = wavelength < self.original_max_positions / self.high_freq_factor
        return torch.where(slow, plain / self.factor, torch.where(fast, plain, blended))


def ntk_exponent(scaling: RopeScaling, rotary_dim: int) -> float:
    """Returns `d / (d - 2)`, the exponent of the factor by which NTK-aware scalings multiply the base.

    Raises:
        ValueError: for a rotary width of 2, for which it is not defined.
    """
    if rotary_dim < 4:
        raise ValueError(
            f"{type(scaling).__name__} needs a rotary width of at least 4, got {rotary_dim}: its exponent is d / (d - "
            "2)."
        )
    return rotary_dim / (rotary_dim - 2)
