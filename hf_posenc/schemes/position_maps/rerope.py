"""Distances that stop growing (ReRoPE) or grow slowly (Leaky ReRoPE) beyond a window."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.position_maps.pairwise import FarPositionsConfig
from hf_posenc.schemes.scheme import option, register_scheme


@register_scheme
class ReRopeConfig(FarPositionsConfig):
    """RoPE with distances that stop growing at a window (ReRoPE and Leaky ReRoPE, Jianlin Su, kexue.fm/archives/9708).

    For query `i` and key `j <= i`, the scheme uses the distance::

        i - j                                if i - j < window
        window                               otherwise, with factor=None (ReRoPE)
        window + (i - j - window) / factor   otherwise (Leaky ReRoPE, where the factor is called k)

    It needs no training. A bias corrects the rotation of far pairs, so the cache holds the keys as rotated by the
    layer. The official code also multiplies queries by a logarithm of their position; compose with `log_n_scale` for
    that. As an extension of the source, distance biases are supported too; `t5`, which needs integer distances, only
    with `factor=None` or 1. `factor=1` gives the inner scheme.

    Args:
        inner: a rotation proportional to positions (`rope` with any scaling, `p_rope`), a distance bias, or both.
        window: the smallest distance that changes, in tokens, 512 in the official code.
        factor: at least 1, 16 in the official code of Leaky ReRoPE; `None` for ReRoPE.
    """

    name: ClassVar[str] = "rerope"

    window: int = option(512, minimum=1)
    factor: float | None = option(None, minimum=1)

    @property
    def gives_real_positions(self) -> bool:  # type: ignore[override]
        """Whether positions are divided by a factor."""
        return self.factor not in (None, 1)

    def query(self, ids: Tensor) -> Tensor:
        """Returns `window + (i - window) / factor`, or `window`."""
        if self.factor is None:
            return torch.full_like(ids, self.window)
        if self.factor == 1:
            return ids
        return self.window + (ids - self.window).float() / self.factor

    def key(self, ids: Tensor) -> Tensor:
        """Returns `j / factor`, or 0."""
        if self.factor is None:
            return torch.zeros_like(ids)
        return ids if self.factor == 1 else ids.float() / self.factor
