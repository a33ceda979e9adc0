"""Shifted and scaled positions."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.parts import PositionMap, Positions
from hf_posenc.schemes.position_maps.mapped import PositionMapConfig
from hf_posenc.schemes.scheme import option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR


class AffineMap(PositionMap):
    """Maps `p` to `factor * p + offset`. Integers stay integers if the factor is an integer.

    Args:
        factor: a positive number.
        offset: at least 0, so that no token becomes padding.
    """

    keeps_distances = property(lambda self: self.factor == 1)

    def __init__(self, factor: float = 1.0, offset: int = 0) -> None:
        super().__init__()
        self.factor = int(factor) if float(factor).is_integer() else factor
        self.offset = offset
        self.gives_real_positions = not isinstance(self.factor, int)

    def last_position(self, last: int) -> int:
        """`factor * last + offset`, rounded down."""
        return math.floor(self.factor * last) + self.offset

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)`, int64 for integer positions and an integer factor, otherwise float32."""
        ids = positions.ids if isinstance(self.factor, int) else positions.ids.float()
        return (ids * self.factor + self.offset).where(positions.ids >= 0, ids)


@register_scheme
class PositionShiftConfig(PositionMapConfig):
    """Adds an offset to the positions of a scheme: `p + offset` (fairseq's tables start at 2).

    ::

        new_position = p + offset

    Schemes that depend only on distances, such as `rope` and `alibi`, do not change. Padding stays padding.

    Args:
        inner: the scheme that gets the positions.
        offset: in tokens, at least 0.
    """

    name: ClassVar[str] = "position_shift"

    offset: int = option(1, minimum=0)

    def position_map(self) -> AffineMap:
        """Returns a new map."""
        return AffineMap(offset=self.offset)


@register_scheme
class PositionScaleConfig(PositionMapConfig):
    """Multiplies the positions of a scheme by a factor (position interpolation, arXiv:2306.15595, eq. 4).

    ::

        new_position = factor * p

    The paper interpolates RoPE: `factor = 1 / s` is `RopeConfig(scaling=LinearScaling(s))`. With an integer factor,
    positions stay integers. Any other factor gives real positions, which schemes for integer positions (`learned`,
    `binary`, `t5`, `shaw`, ...) refuse.

    Args:
        inner: the scheme that gets the positions.
        factor: greater than 0; the default halves all distances.
    """

    name: ClassVar[str] = "position_scale"

    factor: float = option(0.5, minimum=SMALLEST_FACTOR)

    def position_map(self) -> AffineMap:
        """Returns a new map."""
        return AffineMap(self.factor)
