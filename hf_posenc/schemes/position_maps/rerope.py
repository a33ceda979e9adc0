"""Distances that stop growing (ReRoPE), or grow slowly (Leaky ReRoPE), past a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.position_maps.pairwise import FarPositions, FarPositionsConfig
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_integer, check_number


@dataclass(frozen=True)
class RectifiedPositions(FarPositions):
    """Far tokens are a window apart, plus the rest of their distance divided by a factor.

    Args:
        window: as in `FarPositions`.
        factor: the divisor; `None` for an infinite one.
    """

    factor: float | None

    @property
    def gives_real_positions(self) -> bool:
        """Whether positions are divided."""
        return self.factor not in (None, 1)

    def query(self, ids: Tensor) -> Tensor:
        """`window + (i - window) / factor`, or `window`."""
        if self.factor is None:
            return torch.full_like(ids, self.window)
        if self.factor == 1:
            return ids
        return self.window + (ids - self.window).float() / self.factor

    def key(self, ids: Tensor) -> Tensor:
        """`j / factor`, or 0."""
        if self.factor is None:
            return torch.zeros_like(ids)
        return ids if self.factor == 1 else ids.float() / self.factor


@register_scheme
@dataclass(frozen=True)
class ReRopeConfig(FarPositionsConfig):
    """RoPE whose distances stop growing at a window (ReRoPE and Leaky ReRoPE, Jianlin Su, kexue.fm/archives/9708).

    The distance that query `i` and key `j <= i` have for the scheme is::

        i - j                                if i - j < window
        window                               otherwise, with factor=None (ReRoPE)
        window + (i - j - window) / factor   otherwise (Leaky ReRoPE, where the factor is called k)

    It needs no training. The rotation of far pairs is corrected by a bias, so that keys are cached as the layer
    rotated them. The official code also multiplies queries by a logarithm of their position, which is a scheme of its
    own to compose with (`log_n_scale`). Distance biases are rectified as well, beyond the source; `t5`, which needs
    whole distances, only with `factor=None` or 1. `factor=1` is the scheme itself.

    Args:
        inner: a rotation proportional to positions (`rope` with any scaling, `p_rope`), a distance bias, or both.
        window: the smallest distance that is changed, in tokens, 512 in the official code.
        factor: at least 1, 16 in the official code of Leaky ReRoPE; `None` for ReRoPE.
    """

    name: ClassVar[str] = "rerope"

    window: int = 512
    factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "window", minimum=1)
        check_number(self, "factor", minimum=1, optional=True)

    def far_positions(self) -> RectifiedPositions:
        """Where far tokens stand."""
        return RectifiedPositions(self.window, self.factor)
