"""The position itself, `p` or `p / N`, along one direction."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.parts import AdditiveEncoding, DeviceConstant, Positions
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import check_strength, option

_DIRECTIONS = ("ones", "random", "one_hot", "learned")
_RANDOM_DIRECTION_SEED = 20241125


class DirectionEncoding(AdditiveEncoding):
    """Adds `scale * coordinate(p) * direction`. Subclasses define the coordinate of a position."""

    def __init__(self, config: _AlongDirectionConfig, context: BuildContext) -> None:
        super().__init__()
        self.scale = config.scale
        self.direction: nn.Parameter | None
        if config.direction == "learned":
            self.direction = self.learned("direction", context.hidden_size, std=context.initializer_range)
        else:
            self.direction = None
            self._fixed = DeviceConstant(_fixed_direction(config.direction, context.hidden_size))

    def coordinates(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len)` float32. Padding (negative positions) counts as position 0."""
        return positions.ids.clamp(min=0).float()

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in float32."""
        coordinates = self.coordinates(positions) * self.scale
        direction = self.direction if self.direction is not None else self._fixed.on(coordinates.device)
        return coordinates.unsqueeze(-1) * direction.float()


class NormalizedEncoding(DirectionEncoding):
    """`DirectionEncoding` with the coordinate `p / N`."""

    def __init__(self, config: NormalizedIntegerConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.length = config.length
        self.subtract_one = config.subtract_one
        self.length_dependent = config.length is None

    def coordinates(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len)` float32: `p / N`, or `p / (N - 1)`. A sequence of one token gets 0."""
        if self.length is None:
            divisor = (positions.lengths - int(self.subtract_one)).clamp(min=1).float()
            return super().coordinates(positions) / divisor
        return super().coordinates(positions) / max(self.length - int(self.subtract_one), 1)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises if `N` is the current length, because the cached tokens were encoded with the old length."""
        if self.length is None and cached_length > 0:
            raise UnsupportedError(
                f"Length-normalised positions change for all {cached_length} cached tokens when the sequence grows to "
                f"{total_length}, so the cache would be wrong. Generate with use_cache=False, or freeze the divisor "
                f"with length=, for example normalized_integer with length={total_length}."
            )


class _AlongDirectionConfig(SchemeConfig):
    """Base of both configs. Each declares `scale` and `direction` itself, because their option orders differ."""

    scale: float
    direction: str

    @property
    def invisible_under_layer_norm(self) -> bool:
        """Whether a LayerNorm removes this encoding exactly."""
        return self.direction == "ones"


@register_scheme
class IntegerConfig(_AlongDirectionConfig):
    """Adds `scale * p * direction` to every token (Hugging Face blog "You could have designed SOTA position encoding").

    To a token at position p it adds, with `u` a fixed vector of the norm `sqrt(hidden)`::

        PE(p) = scale * p * u        u = (1, ..., 1) by default

    The blog's form is `direction="ones"`: the same number on every component. It is *exactly invisible* in models with
    LayerNorm (BERT, GPT-2), which subtracts the mean over components; models with RMSNorm (Llama) are affected by it.

    Args:
        scale: factor of the position, not 0.
        direction: "ones"; "random", a fixed Gaussian direction that does not depend on any global seed; "one_hot", the
            first component; or "learned", drawn from N(0, initializer_range). The fixed ones have the norm
            `sqrt(hidden)`, so that `scale` means the same for each.
    """

    name: ClassVar[str] = "integer"
    part_class = DirectionEncoding

    scale: float = option(1.0, check_strength)
    direction: str = option("ones", choices=_DIRECTIONS)


@register_scheme
class NormalizedIntegerConfig(_AlongDirectionConfig):
    """Adds `scale * p / N * direction` to every token (as in `integer`), with `N` the number of real tokens.

    To a token at position p of a sequence of N it adds, with `u` as in `integer`::

        PE(p) = scale * p / N * u

    If `N` is the current length, the vector of a position changes as the sequence grows, so a cache cannot be extended.
    Like `IntegerConfig`, it is invisible under LayerNorm with `direction="ones"`.

    Args:
        length: a fixed `N` in tokens, or `None` for the current length of each sequence.
        subtract_one: divides by `N - 1`, so that the last token has coordinate 1.
        scale: factor of the coordinate, not 0.
        direction: as in `IntegerConfig`.
    """

    name: ClassVar[str] = "normalized_integer"
    part_class = NormalizedEncoding

    length: int | None = option(None, minimum=1)
    subtract_one: bool = option(False)
    scale: float = option(1.0, check_strength)
    direction: str = option("ones", choices=_DIRECTIONS)


def _fixed_direction(direction: str, hidden_size: int) -> Tensor:
    if direction == "ones":
        return torch.ones(hidden_size, dtype=torch.float32, device="cpu")
    if direction == "one_hot":
        vector = torch.zeros(hidden_size, dtype=torch.float32, device="cpu")
        vector[0] = math.sqrt(hidden_size)
        return vector
    generator = torch.Generator(device="cpu").manual_seed(_RANDOM_DIRECTION_SEED)
    vector = torch.randn(hidden_size, generator=generator, dtype=torch.float32, device="cpu")
    return vector * (math.sqrt(hidden_size) / vector.norm())
