"""Positions up to a maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.position_maps.mapped import PositionMap, PositionMapConfig
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_integer


class ClampMap(PositionMap):
    """`min(p, maximum)`.

    Args:
        maximum: the last position that stays itself.
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
@dataclass(frozen=True)
class PositionClampConfig(PositionMapConfig):
    """Puts all tokens past a maximum at that position (as BiPE's code does within segments, arXiv:2401.16421).

    ::

        new_position = min(p, maximum)

    So a learned table, or another scheme that never saw more, runs at any length; tokens past the maximum are not told
    apart, and distances between them are 0.

    Args:
        inner: the scheme that gets the positions.
        maximum: the last position that stays itself, in tokens from 0.
    """

    name: ClassVar[str] = "position_clamp"

    maximum: int = 1023

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "maximum", minimum=0)

    def position_map(self) -> ClampMap:
        """A new map."""
        return ClampMap(self.maximum)
