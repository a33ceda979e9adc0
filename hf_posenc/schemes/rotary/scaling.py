"""Ways to stretch RoPE to sequences longer than it was trained on.

Each agrees with the function of the same name in transformers where there is one. Notation: `theta` the base,
`d` the rotary width, `m = 0 .. d/2 - 1` the pair, `s` the factor, `L` the original length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import SubConfig, constructor_example, required_options
from hf_posenc.schemes.validation import check_boolean, check_integer, check_number, check_numbers


def rope_exponents(rotary_dim: int) -> Tensor:
    """`(d/2,)` float32: `2m / d`."""
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotary_dim


def rope_inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """`(d/2,)` float32: `theta**(-2m / d)` radians per position (RoPE, arXiv:2104.09864, section 3.2.2)."""
    return 1.0 / (theta ** rope_exponents(rotary_dim))


@dataclass(frozen=True)
class RopeScaling(SubConfig):
    """Common to all scalings. One that does not depend on the length only overrides `constants`."""

    #: Whether the frequencies depend on the length of the sequence.
    length_dependent: ClassVar[bool] = False

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Everything that does not depend on the length, `(..., d/2)` float32 on the CPU.

        Raises:
            ValueError: if the scaling has no meaning for this `theta` and `rotary_dim`.
        """
        raise NotImplementedError

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """The inverse frequencies of sequences of the given lengths.

        Args:
            constants: what `constants` returned, on the device of `lengths`.
            theta: the base.
            rotary_dim: the rotary width `d`.
            lengths: int64 of any shape.

        Returns:
            float32 in radians per position, broadcasting to `(*lengths.shape, d/2)`.
        """
        return constants

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """The factor of cosine and sine.

        Args:
            max_positions: the length the model was extended to, for scalings that may infer their factor from it.
        """
        return 1.0

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to extend a cache whose keys were rotated with other frequencies.

        Raises:
            UnsupportedError: if the frequencies at the two lengths differ.
        """

    def spectrum(
        self, theta: float, rotary_dim: int, length: int | None = None, max_positions: int | None = None
    ) -> tuple[Tensor, float]:
        """`(d/2,)` inverse frequencies at one length (default: a short one) and the attention scaling."""
        constants = self.constants(theta, rotary_dim)
        lengths = torch.tensor(1 if length is None else length, device="cpu")
        return self.at_lengths(constants, theta, rotary_dim, lengths), self.attention_scaling(max_positions)


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv:2306.15595, eq. 4): all frequencies divided by `s`.

    Args:
        factor: `s`, at least 1.
    """

    type: ClassVar[str] = "linear"

    factor: float

    def __post_init__(self) -> None:
        check_number(self, "factor", minimum=1)

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """`theta**(-2m/d) / s`."""
        return rope_inverse_frequencies(theta, rotary_dim) / self.factor


@dataclass(frozen=True)
class NtkScaling(RopeScaling):
    """NTK-aware scaling (described in arXiv:2309.00071, definition 1): the base becomes `theta * s**(d / (d - 2))`.

    Args:
        factor: `s`, at least 1.
    """

    type: ClassVar[str] = "ntk"

    factor: float

    def __post_init__(self) -> None:
        check_number(self, "factor", minimum=1)

    def stretched_theta(self, theta: float, rotary_dim: int) -> float:
        """The new base.

        Raises:
            ValueError: for a rotary width of 2, where the exponent has no value.
        """
        return theta * float(self.factor) ** _ntk_exponent(self, rotary_dim)

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """The plain spectrum of the new base."""
        return rope_inverse_frequencies(self.stretched_theta(theta, rotary_dim), rotary_dim)


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: NTK-aware scaling that grows with the sequence (described in arXiv:2309.00071, section 3.3).

    For a length `T > L` the base is `theta * (s T / L - (s - 1))**(d / (d - 2))`; up to `L` it is `theta`. Each
    sequence of a batch goes by its own length.

    Args:
        factor: `s`, at least 1.
        original_max_positions: `L`.
    """

    type: ClassVar[str] = "dynamic"
    length_dependent: ClassVar[bool] = True

    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        check_number(self, "factor", minimum=1)
        check_integer(self, "original_max_positions", minimum=1)

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """The exponents `2m / d`."""
        _ntk_exponent(self, rotary_dim)
        return rope_exponents(rotary_dim)

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """`(*lengths.shape, d/2)`."""
        original = self.original_max_positions
        stretch = self.factor * lengths.clamp(min=original).float() / original - (self.factor - 1)
        grown = theta * stretch ** _ntk_exponent(self, rotary_dim)
        base = torch.where(lengths > original, grown, theta)
        return 1.0 / (base.unsqueeze(-1) ** constants)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to grow past the original length with cached keys."""
        if 0 < cached_length < total_length and total_length > self.original_max_positions:
            raise UnsupportedError(
                f"Dynamic NTK scaling changes the frequencies of all {cached_length} cached keys when the sequence "
                f"grows to {total_length}, past the original length of {self.original_max_positions}, so the cache "
                "would be wrong. Generate with use_cache=False, or use a scaling that does not depend on the length, "
                "such as 'ntk' or 'yarn'."
            )


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv:2309.00071, section 3.4): high frequencies kept, low ones divided by `s`, a ramp in between.

    As in the authors' code and transformers, the ramp is linear in the pair index, between the (rounded) indices at
    which a pair makes `beta_fast` and `beta_slow` turns within `L`; the paper's eq. 13 has it linear in the number of
    turns. Cosine and sine are multiplied by `0.1 ln(s) + 1`.

    Args:
        factor: `s`, at least 1.
        original_max_positions: `L`.
        beta_fast: turns within `L` from which on a frequency is kept.
        beta_slow: turns within `L` below which a frequency is fully divided.
        attention_factor: the factor of cosine and sine, instead of the paper's.
        mscale: with `mscale_all_dim`, the factor is `(0.1 mscale ln(s) + 1) / (0.1 mscale_all_dim ln(s) + 1)`
            (DeepSeek-V2); where either is absent or 0, the paper's.
        mscale_all_dim: see `mscale`.
        truncate: rounds the ends of the ramp outwards to whole pairs.
    """

    type: ClassVar[str] = "yarn"

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_number(self, "factor", minimum=1)
        check_integer(self, "original_max_positions", minimum=1)
        check_number(self, "beta_fast", above=0)
        check_number(self, "beta_slow", above=0)
        check_number(self, "attention_factor", above=0, optional=True)
        check_number(self, "mscale", minimum=0, optional=True)
        check_number(self, "mscale_all_dim", minimum=0, optional=True)
        check_boolean(self, "truncate")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"YarnScaling.beta_fast is {self.beta_fast}; expected more than beta_slow={self.beta_slow}: pairs that "
                "turn faster than beta_fast are kept, and those slower than beta_slow are divided."
            )

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """The blended spectrum."""
        if theta <= 1:
            raise ValueError(f"YarnScaling needs theta greater than 1, got {theta}: its ramp divides by ln(theta).")
        low = self._pair_with_turns(self.beta_fast, theta, rotary_dim)
        high = self._pair_with_turns(self.beta_slow, theta, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        wavelengths = theta ** rope_exponents(rotary_dim)
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """`attention_factor`, or what `mscale` and `mscale_all_dim` give, or the paper's `0.1 ln(s) + 1`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _pair_with_turns(self, turns: float, theta: float, rotary_dim: int) -> float:
        """The (fractional) pair index at which a pair makes that many turns within the original length."""
        ratio = self.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(theta))


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv:2402.13753): every frequency divided by its own factor, with one set for long sequences.

    Cosine and sine are multiplied by `sqrt(1 + ln(s) / ln(L))`. Each sequence of a batch goes by its own length.

    Args:
        short_factor: `d/2` divisors for lengths up to `L`.
        long_factor: `d/2` divisors for lengths past `L`.
        original_max_positions: `L`.
        factor: `s`; `None` takes the model's length divided by `L` (Phi-3).
        attention_factor: the factor of cosine and sine, instead of the paper's.
    """

    type: ClassVar[str] = "longrope"
    length_dependent: ClassVar[bool] = True

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "short_factor", above=0)
        check_numbers(self, "long_factor", above=0)
        check_integer(self, "original_max_positions", minimum=2)
        check_number(self, "factor", minimum=1, optional=True)
        check_number(self, "attention_factor", above=0, optional=True)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRopeScaling has {len(self.short_factor)} short factors and {len(self.long_factor)} long ones; "
                "expected one of each per rotated pair."
            )

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """`(2, d/2)`: the short and the long spectrum."""
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

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """`attention_factor`, or the paper's formula.

        Raises:
            ValueError: if it needs `s`, and neither `factor` nor `max_positions` gives it.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor
        if factor is None:
            if max_positions is None:
                raise ValueError(
                    "LongRopeScaling.factor is None and this model has no length to infer it from. Give factor= (the "
                    "extended length divided by original_max_positions) or attention_factor=."
                )
            factor = max_positions / self.original_max_positions
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.original_max_positions))

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to cross the original length with cached keys."""
        if 0 < cached_length <= self.original_max_positions < total_length:
            raise UnsupportedError(
                f"LongRoPE switches from its short to its long factors at {self.original_max_positions} tokens, and "
                f"the {cached_length} cached keys were rotated with the short ones, so the cache would be wrong for a "
                f"sequence of {total_length}. Generate with use_cache=False, or process the prompt anew with more "
                f"than {self.original_max_positions} tokens."
            )


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling: NTK-by-parts (arXiv:2309.00071, definition 2), linear in the number of turns.

    With `r` the turns a pair makes within `L`: kept for `r > high_freq_factor`, divided by `s` for
    `r < low_freq_factor`, and blended linearly in `r` between.

    Args:
        factor: `s`, at least 1.
        low_freq_factor: turns below which a frequency is fully divided.
        high_freq_factor: turns above which a frequency is kept.
        original_max_positions: `L`.
    """

    type: ClassVar[str] = "llama3"

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        check_number(self, "factor", minimum=1)
        check_number(self, "low_freq_factor", above=0)
        check_number(self, "high_freq_factor", above=0)
        check_integer(self, "original_max_positions", minimum=1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor is {self.high_freq_factor}; expected more than "
                f"low_freq_factor={self.low_freq_factor}, because the frequencies between them are blended."
            )

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """The blended spectrum."""
        plain = rope_inverse_frequencies(theta, rotary_dim)
        wavelength = 2 * math.pi / plain
        turns = self.original_max_positions / wavelength
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * plain / self.factor + blend * plain
        slow = wavelength > self.original_max_positions / self.low_freq_factor
        fast = wavelength < self.original_max_positions / self.high_freq_factor
        return torch.where(slow, plain / self.factor, torch.where(fast, plain, blended))


def check_scaling(config: Any) -> None:
    """Requires `config.scaling` to be a `RopeScaling`, its dictionary, the type of one without options, or `None`.

    A type or a dictionary, as a user types it, is replaced by its scaling.

    Raises:
        UnknownNameError: for an unknown type.
        ValueError: for any other value.
    """
    option, scaling = f"{type(config).__name__}.scaling", config.scaling
    if isinstance(scaling, str):
        found = RopeScaling.type_named(scaling)
        if required_options(found):
            raise ValueError(
                f"{option} is {scaling!r}, a scaling with options that have no default: give "
                f"{constructor_example(found)}, or a dictionary such as {_dictionary_example(found)}."
            )
        scaling = found()
        object.__setattr__(config, "scaling", scaling)
    if isinstance(scaling, dict) and {"rope_type", "rope_theta", "original_max_position_embeddings"} & set(scaling):
        raise ValueError(
            f"{option} is {scaling!r}, which are RoPE parameters as transformers writes them. "
            "hf_posenc.schemes.from_rope_parameters(parameters) makes a RopeConfig of them; native_scheme(model) does "
            "so for a whole model."
        )
    if isinstance(scaling, dict) and "type" in scaling:
        scaling = SubConfig.from_dict(scaling)
        object.__setattr__(config, "scaling", scaling)
    if scaling is not None and not isinstance(scaling, RopeScaling):
        raise ValueError(
            f"{option} is {scaling!r}; expected a scaling such as YarnScaling(factor=4.0, "
            "original_max_positions=2048), or None."
        )


def _dictionary_example(found: type[RopeScaling]) -> str:
    return "{" + ", ".join([f'"type": "{found.type}"', *(f'"{name}": ...' for name in required_options(found))]) + "}"


def _ntk_exponent(scaling: RopeScaling, rotary_dim: int) -> float:
    if rotary_dim < 4:
        raise ValueError(
            f"{type(scaling).__name__} needs a rotary width of at least 4, got {rotary_dim}: it raises to d / (d - 2)."
        )
    return rotary_dim / (rotary_dim - 2)
