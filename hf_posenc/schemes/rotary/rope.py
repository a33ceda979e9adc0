"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hf_posenc.schemes.parts import DeviceConstant, Positions, QueryKeyMap, Reach, SchemeParts
from hf_posenc.schemes.rotary.rotation_kernel import (
    RotationFactors,
    apply_rotation,
    for_both_of_pair,
    rotation_factors,
    signed_for_both_of_pair,
)
from hf_posenc.schemes.rotary.scaling import RopeScaling, check_scaling
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.statements import overrides
from hf_posenc.schemes.validation import (
    LARGEST_FREQUENCY,
    SMALLEST_FACTOR,
    check_base,
    check_choice,
    check_integer,
    option,
)
from hf_posenc.schemes.weights import Layers

#: The end of an error message about a rotation that cannot be scaled, after its name.
STATED_BY_FREQUENCIES = (
    "is given by a list of frequencies and not by theta, which a scaling needs. A model whose buffers were cast, by "
    "model.to(torch.bfloat16) for example, reads like this too: load it with from_pretrained(dtype=...) or build it "
    "with from_config(config, dtype=...) instead, or patch it with 'rope' and its theta."
)
#: Why a rotary width is even.
IN_PAIRS = "dimensions are rotated in pairs"
ROPE_LAYOUTS = ("auto", "half", "half_reversed", "interleaved")


class RotaryMap(QueryKeyMap):
    """Rotates the first `rotary_dim` dimensions of every query and key; the rest pass through.

    Args:
        inverse_frequencies: `(rotary_dim / 2,)` float32, radians per position.
        layout: "half" pairs dimension `m` with `m + rotary_dim / 2`, "half_reversed" has the same pairs but rotates in
            the opposite direction, "interleaved" pairs `2m` with `2m + 1`.
        attention_scaling: factor of cosine and sine.
    """

    rotary_dim: int
    turns_by_frequencies = True
    reads_magnitude = False

    def __init__(self, inverse_frequencies: Tensor, layout: str, attention_scaling: float = 1.0) -> None:
        super().__init__()
        self.rotary_dim = 2 * inverse_frequencies.shape[-1]
        self.layout = "half" if layout == "auto" else layout
        self.attention_scaling = attention_scaling
        self._constants = DeviceConstant(inverse_frequencies)
        self._signed_constants = DeviceConstant(signed_for_both_of_pair(inverse_frequencies, self.layout))

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """Returns float32 that broadcasts to `(batch or 1, query_len, rotary_dim / 2)`, for `lengths` `(batch or 1,
        1)`.

        A map with different heads returns `(key_value_heads, rotary_dim / 2)`.
        """
        return self._constants.on(lengths.device)

    def signed_frequencies(self, positions: Positions) -> Tensor:
        """The frequencies for both dimensions of each pair, with the sign of the sine; not "interleaved".

        For a map whose frequencies depend on its weights alone. While tokens are decoded, a cache keeps them.
        """
        if type(self).inverse_frequencies is RotaryMap.inverse_frequencies:
            return self._signed_constants.on(positions.ids.device)

        def compute(layers: Layers) -> tuple[Tensor]:
            if not self._parameters:
                return (signed_for_both_of_pair(self.inverse_frequencies(positions.lengths), self.layout)[None],)
            return (signed_for_both_of_pair(layers.stacked().inverse_frequencies(positions.lengths), self.layout),)

        (frequencies,) = positions.of_weights(self, "signed frequencies", compute)
        return cast("Tensor", frequencies)

    def angles(self, positions: Positions) -> Tensor:
        """Returns the angle of each pair in radians, `(batch or 1, query_len, rotary_dim / 2)` float32.

        A map with different heads returns `(batch or 1, query_len, key_value_heads, rotary_dim / 2)`.
        """
        frequencies = self.inverse_frequencies(positions.lengths)
        ids = positions.ids.unsqueeze(-1).float()
        return (ids.unsqueeze(-1) if frequencies.ndim == 2 else ids) * frequencies

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns cosine and sine, each `(batch or 1, query_len, rotary_dim)` in float32.

        For a map with different heads, each is `(batch or 1, query_len, key_value_heads, rotary_dim)`.
        """
        angles = self.for_both_of_pair(self.angles(positions))
        cosine, sine = angles.cos(), angles.sin()
        factor = self.attention_factor(positions.lengths)
        if not isinstance(factor, Tensor) and factor == 1.0:
            return cosine, sine
        return cosine * factor, sine * factor

    def attention_factor(self, lengths: Tensor) -> Tensor | float:
        """Returns the factor of cosine and sine: one, or `(batch or 1, 1, 1)` for `lengths` `(batch or 1, 1)`."""
        return self.attention_scaling

    def for_both_of_pair(self, values: Tensor) -> Tensor:
        """Repeats a value per pair, `(..., rotary_dim / 2)`, for both dimensions of the pair, `(..., rotary_dim)`."""
        return for_both_of_pair(values, self.layout)

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the factors of queries and of keys, in the dtype of the heads."""
        factors = rotation_factors(phases[0], phases[1], self.layout, dtype)
        return factors, factors if len(phases) == 2 else rotation_factors(phases[2], phases[3], self.layout, dtype)

    def map_query(self, query: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """Rotates queries `(batch, heads, query_len, head_dim)`, by phases or the output of `prepared`."""
        return apply_rotation(query, self._factors(phases, query)[0], self.layout)

    def map_key(self, key: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """Rotates keys `(batch, key_value_heads, query_len, head_dim)`, as `map_query`."""
        return apply_rotation(key, self._factors(phases, key)[1], self.layout)

    def _factors(self, phases: tuple[Any, ...], heads: Tensor) -> tuple[Any, ...]:
        return phases if isinstance(phases[0], RotationFactors) else self.prepared(phases, heads.dtype)


def by_frequencies_alone(rotation: RotaryMap, owner: str) -> RotaryMap:
    """Refuses a rotation of which a part that computes angles itself, `owner`, would ignore something."""
    if not rotation.turns_by_frequencies or rotation.attention_scaling != 1:
        raise ValueError(
            f"{owner} reads only the frequencies of its rotation, and {type(rotation).__name__} computes more than "
            f"them. Override inverse_frequencies instead, or the methods of {owner}."
        )
    return rotation


class LengthDependentRotaryMap(RotaryMap):
    """A `RotaryMap` with frequencies that depend on the length of each sequence.

    Args:
        config: the options, with a scaling that depends on the length.
        context: the place in the model, from whose length a scaling may infer its factor.
    """

    length_dependent = True

    def __init__(self, config: RotaryConfig, context: BuildContext) -> None:
        super().__init__(config.frequencies(context), config.layout, config._attention_factor(context))
        self.config = config
        self.max_positions = context.max_positions

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """`(batch or 1, 1, rotary_dim / 2)` float32, for `lengths` `(batch or 1, 1)`."""
        constants, config = super().inverse_frequencies(lengths), self.config
        return config.applied_scaling.at_lengths(constants, config.theta, self.rotary_dim, lengths)

    def attention_factor(self, lengths: Tensor) -> Tensor | float:
        """The factor of the scaling, unless another one was given."""
        if getattr(self.config, "attention_scaling", None) is not None:
            return self.attention_scaling
        factor = self.config.applied_scaling.attention_at_lengths(lengths, self.max_positions)
        return factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if the frequencies at the two lengths differ."""
        self.config.applied_scaling.check_cache(cached_length, total_length)


class RotaryConfig(SchemeConfig):
    """Base class of configs of a rotation. Each declares these options itself, because their orders differ."""

    theta: float
    rotary_dim: int | None
    layout: str

    def __post_init__(self) -> None:
        check_base(self, "theta")
        if self.rotary_dim is not None:
            check_integer(self, "rotary_dim", minimum=2, even=IN_PAIRS)
        check_choice(self, "layout", ROPE_LAYOUTS)
        super().__post_init__()
        if getattr(self, "inverse_frequencies", None) is not None and self.theta != type(self).theta:
            raise ValueError(
                f"{type(self).__name__} has both inverse_frequencies and theta={self.theta}, which defines the "
                "frequencies too; give only one of them."
            )

    @property
    def applied_scaling(self) -> RopeScaling:
        """The scaling of the frequencies, by default none."""
        return RopeScaling()

    def frequencies(self, context: BuildContext) -> Tensor:
        """The frequency of each pair, `(rotary_dim / 2,)` float32, in radians per position; by default those of RoPE.

        With a scaling that depends on the length, its constants.

        Raises:
            ValueError: if the rotary width is odd, does not fit the head or the number of `inverse_frequencies`, or if
                a length is needed and missing.
        """
        rotary_dim, given = self._rotary_dim(context), getattr(self, "inverse_frequencies", None)
        if given is None:
            return self.applied_scaling.constants(self.theta, rotary_dim)
        if 2 * len(given) != rotary_dim:
            raise ValueError(
                f"{type(self).__name__}.inverse_frequencies has {len(given)} frequencies, but {rotary_dim} rotated "
                f"dimensions need {rotary_dim // 2}."
            )
        return torch.tensor(given, dtype=torch.float32, device="cpu")

    def _rotary_dim(self, context: BuildContext) -> int:
        return resolve_rotary_dim(self, self.rotary_dim, context)

    def _attention_factor(self, context: BuildContext) -> float:
        """The factor of cosine and sine: the option `attention_scaling`, or that of the scaling at short lengths."""
        given = getattr(self, "attention_scaling", None)
        return self.applied_scaling.attention_scaling(context.max_positions) if given is None else given

    def rotation(self, context: BuildContext) -> QueryKeyMap:
        """The map of queries and keys, with the length that a scaling is made for; raises as `frequencies`."""
        if self.applied_scaling.length_dependent:
            rotation: RotaryMap = LengthDependentRotaryMap(self, context)
        else:
            rotation = RotaryMap(self.frequencies(context), self.layout, self._attention_factor(context))
        rotation.length_reach = Reach(made_for=self.applied_scaling.made_for(context.max_positions))
        return rotation

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a query-key map, or the part of this scheme.

        Raises:
            UnsupportedError: in a bidirectional model, for a scheme that is not defined for later keys.
            ValueError: if the rotary width is odd or does not fit the head, or other options do not fit this layer.
        """
        if self.part_class is not None and not overrides(type(self), "rotation", "part_class"):
            return super().build(context)
        return SchemeParts(query_key_map=self.rotation(context))


@register_scheme
class RopeConfig(RotaryConfig):
    """Rotates queries and keys by angles proportional to their position (RoPE, arXiv:2104.09864, eq. 34).

    For a query or key at position p, the pair of dimensions m, with values `(a, b)`, becomes::

        (a cos - b sin, b cos + a sin)   of the angle   p * theta ** (-2m / rotary_dim)

    Queries and keys are rotated in the same way, so their product depends only on the distance between their positions.
    A `scaling` changes the frequencies and may multiply cosine and sine by a factor.

    Args:
        theta: the base; pair `m` rotates by `theta**(-2m / rotary_dim)` radians per position.
        rotary_dim: how many leading dimensions of a head are rotated (even). `None` takes `partial_rotary_factor`,
            otherwise the number that the architecture itself rotates, otherwise the whole head.
        partial_rotary_factor: the rotated fraction of a head, rounded down to an even number of dimensions.
        layout: "half" pairs dimension `m` with `m + rotary_dim / 2` (Llama), "interleaved" pairs `2m` with `2m + 1`
            (GPT-J), "half_reversed" has the pairs of "half" but rotates in the opposite direction (nanochat). "auto" is
            the pairing of the architecture, or "half" if it has none.
        scaling: a scaling to longer sequences, such as `YarnScaling(factor=4.0, original_max_positions=2048)`.
        inverse_frequencies: explicit frequencies in radians per position, one per pair, instead of `theta` and
            `scaling`; for spectra without a formula here.
        attention_scaling: factor of cosine and sine; `None` takes the factor of the scaling, or 1 without a scaling.
    """

    name: ClassVar[str] = "rope"

    theta: float = 10000.0
    rotary_dim: int | None = None
    partial_rotary_factor: float | None = option(None, above=0, maximum=1)
    layout: str = "auto"
    scaling: RopeScaling | None = option(None, check_scaling)
    inverse_frequencies: tuple[float, ...] | None = option(None, minimum=0, maximum=LARGEST_FREQUENCY)
    attention_scaling: float | None = option(None, minimum=SMALLEST_FACTOR)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim is not None and self.partial_rotary_factor is not None:
            raise ValueError(
                f"RopeConfig has both rotary_dim={self.rotary_dim} and "
                f"partial_rotary_factor={self.partial_rotary_factor}, which both set the rotated width; give only one."
            )
        if self.inverse_frequencies is None:
            return
        if self.scaling is not None:
            raise ValueError(
                "RopeConfig has both inverse_frequencies and a scaling; explicit frequencies are not scaled. Give "
                "one of them, and attention_scaling= if cosine and sine need a factor."
            )
        width = 2 * len(self.inverse_frequencies)
        if self.partial_rotary_factor is not None or self.rotary_dim not in (None, width):
            raise ValueError(
                f"RopeConfig has {len(self.inverse_frequencies)} inverse_frequencies, which rotate {width} "
                f"dimensions. Omit partial_rotary_factor, and omit rotary_dim or set it to {width}."
            )

    @property
    def applied_scaling(self) -> RopeScaling:
        """The scaling of the option."""
        return self.scaling or RopeScaling()

    def _rotary_dim(self, context: BuildContext) -> int:
        rotary_dim = self.rotary_dim
        if self.inverse_frequencies is not None:
            rotary_dim = 2 * len(self.inverse_frequencies)
        elif self.partial_rotary_factor is not None:
            rotary_dim = int(self.partial_rotary_factor * context.head_dim) // 2 * 2
            if rotary_dim == 0:
                raise ValueError(
                    f"RopeConfig.partial_rotary_factor={self.partial_rotary_factor} of a head of {context.head_dim} "
                    "dimensions leaves no pair to rotate. Use a larger share, or the scheme 'none'."
                )
        return resolve_rotary_dim(self, rotary_dim, context)


def resolve_rotary_dim(config: SchemeConfig, rotary_dim: int | None, context: BuildContext) -> int:
    """Returns the rotary width at one place of a model: the option, or the architecture's width, or the whole head.

    Raises:
        ValueError: if it is odd or larger than the head.
    """
    resolved = rotary_dim or context.rotary_dim or context.head_dim
    if resolved % 2 or resolved > context.head_dim:
        raise ValueError(
            f"{type(config).__name__} would rotate {resolved} of {context.head_dim} dimensions of a head; expected an "
            f"even number of at most {context.head_dim}. Give rotary_dim={context.head_dim // 2 * 2} or less."
        )
    return resolved
