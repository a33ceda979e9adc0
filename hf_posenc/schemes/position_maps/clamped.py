"""Positions clamped to a maximum."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.parts import PositionMap, Positions
from hf_posenc.schemes.position_maps.mapped import PositionMapConfig
from hf_posenc.schemes.scheme import option, register_scheme


class ClampMap(PositionMap):
    """Maps `p` to `min(p, maximum)`.

    Args:
        maximum: the greatest position after the map.
    """

    def __init__(self, maximum: int) -> None:
        super().__init__()
        self.maximum = maximum

    def last_position(self, last: int) -> int:
        """`min(last, maximum)`."""
        return min(last, self.maximum)

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)` in the dtype of the positions."""
        return positions.ids.clamp(max=self.maximum)


@register_scheme
class PositionClampConfig(PositionMapConfig):
    """Clamps positions to a maximum (as BiPE's code does within segments, arXiv:2401.16421).

    ::

        new_position = min(p, maximum)

    This allows a learned table, or another scheme with a limited length, to run at any length. Tokens past the maximum
    cannot be distinguished, and distances between them are 0.

    Args:
        inner: the scheme that gets the positions.
        maximum: the greatest position after the map; positions count from 0.
    """

    name: ClassVar[str] = "position_clamp"

    maximum: int = option(1023, minimum=0)

    def position_map(self) -> ClampMap:
        """Returns a new map."""
        return ClampMap(self.maximum)
