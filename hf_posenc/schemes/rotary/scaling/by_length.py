"""Scalings with frequencies that change for sequences longer than in training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.rotary.scaling.base import RopeScaling, floor_length, rope_exponents
from hf_posenc.schemes.rotary.scaling.constant import YarnRamp, divided, ntk_exponent
from hf_posenc.schemes.validation import SMALLEST_FACTOR, checked, option


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: NTK-aware scaling that grows with the sequence (described in arXiv:2309.00071, section 3.3).

    For a length `T > L` the base is `theta * (s T / L - (s - 1))**(d / (d - 2))`; up to `L` it is `theta`. Each
    sequence of a batch uses its own length.

    Args:
        factor: `s`, how many times longer the context becomes, at least 1.
        original_max_positions: `L`, the length that the model was trained on, in tokens.
    """

    type: ClassVar[str] = "dynamic"
    length_dependent: ClassVar[bool] = True

    factor: float = field(metadata=checked(minimum=1))
    original_max_positions: int = field(metadata=checked(minimum=1))

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the exponents `2m / d`."""
        ntk_exponent(self, rotary_dim)
        return rope_exponents(rotary_dim)

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """`(*lengths.shape, d/2)`."""
        original = self.original_max_positions
        stretch = self.factor * lengths.clamp(min=original).float() / original - (self.factor - 1)
        grown = theta * stretch ** ntk_exponent(self, rotary_dim)
        base = torch.where(lengths > original, grown, theta)
        return 1.0 / (base.unsqueeze(-1) ** constants)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if a sequence with cached keys grows past the original length."""
        _refuse_growth("Dynamic NTK scaling", self.original_max_positions, cached_length, total_length)


@dataclass(frozen=True)
class DynamicYarnScaling(YarnRamp):
    """Dynamic YaRN: YaRN with a factor for each sequence (arXiv:2309.00071, section 3.3 applied to 3.4).

    For a length `T` the factor is `max(s, T / L)`. With `s = 1`, a sequence of at most `L` tokens has RoPE's own
    frequencies. Cosine and sine are multiplied by `0.1 ln(max(s, T / L)) + 1`. Defined by the authors' code,
    `LlamaDynamicYaRNScaledRotaryEmbedding`, with one difference: each sequence uses its own length, also after a
    longer one.

    Args:
        original_max_positions: `L`, the length that the model was trained on, in tokens.
        factor: `s`, the least factor: 1, or the factor of `YarnScaling` with which the model was trained further (the
            authors' `finetuned`).
        beta_fast: as in `YarnScaling`.
        beta_slow: as in `YarnScaling`.
    """

    type: ClassVar[str] = "dynamic_yarn"
    length_dependent: ClassVar[bool] = True

    original_max_positions: int = field(metadata=checked(minimum=1))
    factor: float = option(1.0, minimum=1)
    beta_fast: float = option(32.0, minimum=SMALLEST_FACTOR)
    beta_slow: float = option(1.0, minimum=SMALLEST_FACTOR)

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns YaRN's ramp, `(2, d/2)`."""
        return self.ramp(theta, rotary_dim)

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """`(*lengths.shape, d/2)`."""
        factors = self._factors(lengths).unsqueeze(-1)
        # Without a factor, the two shares may differ from the whole by a rounding.
        return torch.where(factors > 1, divided(constants, factors), 1.0 / constants[0])

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """Returns the factor of short sequences."""
        return 0.1 * math.log(self.factor) + 1.0

    def attention_at_lengths(self, lengths: Tensor, max_positions: int | None = None) -> Tensor:
        """`lengths.shape`."""
        return 0.1 * self._factors(lengths).log() + 1.0

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if a sequence with cached keys grows past `s * L`."""
        longest = floor_length(self.factor, self.original_max_positions)
        _refuse_growth("Dynamic YaRN", longest, cached_length, total_length)

    def _factors(self, lengths: Tensor) -> Tensor:
        return (lengths.float() / self.original_max_positions).clamp(min=self.factor)


def _refuse_growth(name: str, longest: int, cached_length: int, total_length: int) -> None:
    if 0 < cached_length < total_length and total_length > longest:
        raise UnsupportedError(
            f"{name} changes the frequencies of all {cached_length} cached keys when the sequence grows to "
            f"{total_length}, past the length of {longest}, so the cache would be wrong. Generate with "
            "use_cache=False, or use a scaling that does not depend on the length, such as 'ntk' or 'yarn'."
        )


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv:2402.13753): divides every frequency by its own factor, with separate factors for long sequences.

    Cosine and sine are multiplied by `sqrt(1 + ln(s) / ln(L))`. Each sequence of a batch uses its own length.

    Args:
        short_factor: `d/2` divisors for lengths up to `L`.
        long_factor: `d/2` divisors for lengths past `L`.
        original_max_positions: `L`, the length that the model was trained on, in tokens.
        factor: `s`, how many times longer the context becomes; `None` takes the model's length divided by `L` (Phi-3).
        attention_factor: the factor of cosine and sine; by default the paper's formula.
    """

    type: ClassVar[str] = "longrope"
    length_dependent: ClassVar[bool] = True

    short_factor: tuple[float, ...] = field(metadata=checked(minimum=SMALLEST_FACTOR))
    long_factor: tuple[float, ...] = field(metadata=checked(minimum=SMALLEST_FACTOR))
    original_max_positions: int = field(metadata=checked(minimum=2))
    factor: float | None = option(None, minimum=1)
    attention_factor: float | None = option(None, minimum=SMALLEST_FACTOR)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRopeScaling has {len(self.short_factor)} short factors and {len(self.long_factor)} long ones; "
                "expected one of each per rotated pair."
            )

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the short and the long frequencies, `(2, d/2)`."""
        if len(self.short_factor) != rotary_dim // 2:
            raise ValueError(
                f"LongRopeScaling has {len(self.short_factor)} factors, but {rotary_dim} rotated dimensions make "
                f"{rotary_dim // 2} pairs; expected one factor per pair."
            )
        factors = torch.tensor((self.short_factor, self.long_factor), dtype=torch.float32, device="cpu")
        return 1.0 / (factors * theta ** rope_exponents(rotary_dim))

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """`(*lengths.shape, d/2)`."""
        return torch.where((lengths > self.original_max_positions).unsqueeze(-1), constants[1], constants[0])

    def made_for(self, native_length: int | None) -> int | None:
        """Returns `s * L`, or `None` if `s` is inferred from the model."""
        return None if self.factor is None else floor_length(self.factor, self.original_max_positions)

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """Returns `attention_factor`, or the paper's formula.

        Raises:
            ValueError: if `s` is needed but neither `factor` nor `max_positions` is given.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor
        if factor is None:
            if max_positions is None:
                raise ValueError(
                    "LongRopeScaling.factor is None and the model's config has no length to infer it from. Give "
                    "factor= (the extended length divided by original_max_positions) or attention_factor=."
                )
            factor = max_positions / self.original_max_positions
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original_max_positions))

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if a sequence with cached keys grows past the original length."""
        if 0 < cached_length <= self.original_max_positions < total_length:
            raise UnsupportedError(
                f"LongRoPE switches from its short to its long factors at {self.original_max_positions} tokens, and "
                f"the {cached_length} cached keys were rotated with the short ones, so the cache would be wrong for a "
                f"sequence of {total_length}. Generate with use_cache=False, or process the prompt again with more "
                f"than {self.original_max_positions} tokens."
            )
