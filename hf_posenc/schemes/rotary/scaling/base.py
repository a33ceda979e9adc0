"""The frequencies of RoPE without scaling, and the base class of scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.config import SubConfig, constructor_example, required_options
from hf_posenc.schemes.validation import checked, shown


def rope_exponents(rotary_dim: int) -> Tensor:
    """Returns the exponents `2m / d`, `(d/2,)` float32."""
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotary_dim


def rope_inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Returns `theta**(-2m / d)` radians per position, `(d/2,)` float32 (RoPE, arXiv:2104.09864, section 3.2.2)."""
    return 1.0 / (theta ** rope_exponents(rotary_dim))


@dataclass(frozen=True)
class RopeScaling(SubConfig):
    """Base class of all scalings. A scaling that does not depend on the length only overrides `constants`.

    The base class itself stands for no scaling.
    """

    #: Whether the frequencies depend on the length of the sequence.
    length_dependent: ClassVar[bool] = False

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns everything that does not depend on the length, `(..., d/2)` float32 on the CPU.

        Raises:
            ValueError: if the scaling is not defined for this `theta` and `rotary_dim`.
        """
        if type(self) is not RopeScaling:
            raise NotImplementedError
        return rope_inverse_frequencies(theta, rotary_dim)

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """Returns the inverse frequencies for sequences of the given lengths.

        Args:
            constants: the output of `constants`, on the device of `lengths`.
            theta: the base.
            rotary_dim: the rotary width `d`.
            lengths: int64 of any shape.

        Returns:
            float32 in radians per position, broadcasting to `(*lengths.shape, d/2)`.
        """
        return constants

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """Returns the factor of cosine and sine.

        Args:
            max_positions: the extended length of the model, for scalings that can infer their factor from it.
        """
        return 1.0

    def attention_at_lengths(self, lengths: Tensor, max_positions: int | None = None) -> Tensor | float:
        """Returns the factor of cosine and sine for sequences of the given lengths: one, or `lengths.shape`."""
        return self.attention_scaling(max_positions)

    def made_for(self, native_length: int | None) -> int | None:
        """Returns the extended length in tokens, or `None` if the options do not specify it.

        Args:
            native_length: the training length of the model, for scalings that do not specify it.
        """
        return None

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if the cached keys were rotated with other frequencies.

        Raises:
            UnsupportedError: if the frequencies at the two lengths differ.
        """

    def spectrum(
        self, theta: float, rotary_dim: int, length: int | None = None, max_positions: int | None = None
    ) -> tuple[Tensor, float]:
        """Returns the inverse frequencies `(d/2,)` at one length (default: short) and the attention scaling."""
        constants = self.constants(theta, rotary_dim)
        lengths = torch.tensor(1 if length is None else length, device="cpu")
        attention_scaling = float(self.attention_at_lengths(lengths, max_positions))
        return self.at_lengths(constants, theta, rotary_dim, lengths), attention_scaling


class OuterScaling(RopeScaling):
    """Base class of scalings that change the frequencies after another scaling, or those of RoPE.

    A subclass declares the option `scaling` itself, because their orders differ.
    """

    scaling: RopeScaling | None

    def changed(self, frequencies: Tensor, theta: float) -> Tensor:
        """Returns other frequencies, `(..., d/2)`, for those after the inner scaling.

        Raises:
            ValueError: if the scaling is not defined for this `theta` and `d`.
        """
        raise NotImplementedError

    @property
    def inner(self) -> RopeScaling:
        """The scaling that comes first."""
        return self.scaling or RopeScaling()

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        """Whether the frequencies depend on the length of the sequence."""
        return self.inner.length_dependent

    def constants(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the changed spectrum, or the constants of a length-dependent scaling."""
        constants = self.inner.constants(theta, rotary_dim)
        return constants if self.length_dependent else self.changed(constants, theta)

    def at_lengths(self, constants: Tensor, theta: float, rotary_dim: int, lengths: Tensor) -> Tensor:
        """Broadcasts to `(*lengths.shape, d/2)`."""
        frequencies = self.inner.at_lengths(constants, theta, rotary_dim, lengths)
        return self.changed(frequencies, theta) if self.length_dependent else frequencies

    def attention_scaling(self, max_positions: int | None = None) -> float:
        """Returns the factor of the inner scaling."""
        return self.inner.attention_scaling(max_positions)

    def attention_at_lengths(self, lengths: Tensor, max_positions: int | None = None) -> Tensor | float:
        """Returns the factor of the inner scaling."""
        return self.inner.attention_at_lengths(lengths, max_positions)

    def made_for(self, native_length: int | None) -> int | None:
        """Returns the length that the inner scaling is made for."""
        return self.inner.made_for(native_length)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Applies the check of the inner scaling."""
        self.inner.check_cache(cached_length, total_length)


def floor_length(factor: float, original: int) -> int:
    """`factor * original`, rounded down. A factor that is the quotient of two lengths gives the longer one."""
    return math.floor(factor * original + 1e-6)


@dataclass(frozen=True)
class Factor:
    """Mixin with the option `factor`, the first option of most scalings.

    Args:
        factor: `s`, how many times longer the context becomes, at least 1.
    """

    factor: float = field(metadata=checked(minimum=1))

    def made_for(self, native_length: int | None) -> int | None:
        """Returns `s` times the original length, or times the model's own length if the scaling has none."""
        original = getattr(self, "original_max_positions", native_length)
        return None if original is None else floor_length(self.factor, original)


def check_scaling(config: object, field: str) -> None:
    """Checks that a field is a `RopeScaling`, its dictionary, or the type of one without required options.

    A type or a dictionary is replaced by the corresponding scaling.

    Raises:
        UnknownNameError: for an unknown type.
        ValueError: for any other value.
    """
    option, scaling = f"{type(config).__name__}.{field}", getattr(config, field)
    if isinstance(scaling, str):
        kind = RopeScaling.type_named(scaling)
        if required_options(kind):
            entries = [f'"type": "{kind.type}"', *(f'"{name}": ...' for name in required_options(kind))]
            raise ValueError(
                f"{option} is {shown(scaling)}, a scaling that has required options: give "
                f"{constructor_example(kind)}, or a dictionary such as {{{', '.join(entries)}}}."
            )
        scaling = kind()
        object.__setattr__(config, field, scaling)
    if isinstance(scaling, dict) and {"rope_type", "rope_theta", "original_max_position_embeddings"} & set(scaling):
        raise ValueError(
            f"{option} is {shown(scaling)}, which are rope_parameters in the format of transformers. "
            "hf_posenc.schemes.from_rope_parameters(parameters) converts them to a RopeConfig; native_scheme(model) "
            "does so for a whole model."
        )
    if isinstance(scaling, dict) and "type" in scaling:
        scaling = SubConfig.from_dict(scaling)
        object.__setattr__(config, field, scaling)
    if not isinstance(scaling, RopeScaling):
        raise ValueError(
            f"{option} is {shown(scaling)}; expected a scaling such as YarnScaling(factor=4.0, "
            "original_max_positions=2048), or None."
        )
