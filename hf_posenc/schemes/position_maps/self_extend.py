"""Exact positions nearby, grouped ones far away (Self-Extend)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.position_maps.pairwise import FarPositions, FarPositionsConfig
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_integer


@dataclass(frozen=True)
class GroupedPositions(FarPositions):
    """Far positions are counted in groups, after the window.

    Args:
        window: as in `FarPositions`.
        group: tokens per group.
    """

    group: int

    def query(self, ids: Tensor) -> Tensor:
        """`floor(i / group) + window - floor(window / group)`."""
        return self.key(ids) + (self.window - self.window // self.group)

    def key(self, ids: Tensor) -> Tensor:
        """`floor(j / group)`."""
        return torch.div(ids, self.group, rounding_mode="floor")


@register_scheme
@dataclass(frozen=True)
class SelfExtendConfig(FarPositionsConfig):
    """Groups the positions of far tokens, so that a model reads further than it was trained (arXiv:2401.01325).

    The distance that query `i` and key `j <= i` have for the scheme is::

        i - j                                                          if i - j < window
        floor(i / group) + window - floor(window / group) - floor(j / group)   otherwise

    It needs no training: with `L` positions trained, `(L - window) * group + window` tokens are in reach. The rotation
    of far pairs is corrected by a bias, so that keys are cached as the layer rotated them. The code of the paper adds
    the same `window - floor(window / group)`; its later version divides without rounding down, which differs where
    `window` is no multiple of `group`. Distances are those of positions, which in the code are slots of the cache.
    Distance biases (`alibi`, `t5`) are grouped as well, beyond the paper. `group=1` is the scheme itself.

    Args:
        inner: a rotation proportional to positions (`rope` with any scaling, `p_rope`), a distance bias, or both.
        group: tokens per group, 8 in the official code.
        window: the smallest distance that is grouped, in tokens, 1024 in the official code.
    """

    name: ClassVar[str] = "self_extend"

    group: int = 8
    window: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "group", minimum=1)
        check_integer(self, "window", minimum=1)

    def far_positions(self) -> GroupedPositions:
        """Where far tokens stand."""
        return GroupedPositions(self.window, self.group)
