"""Exact positions for near pairs, grouped positions for far pairs (Self-Extend)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.position_maps.pairwise import FarPositionsConfig
from hf_posenc.schemes.scheme import option, register_scheme


@register_scheme
class SelfExtendConfig(FarPositionsConfig):
    """Groups the positions of far tokens to extend the context of a model without training (arXiv:2401.01325).

    For query `i` and key `j <= i`, the scheme uses the distance::

        i - j                                                          if i - j < window
        floor(i / group) + window - floor(window / group) - floor(j / group)   otherwise

    It needs no training. A model trained on `L` positions can process `(L - window) * group + window` tokens. A bias
    corrects the rotation of far pairs, so the cache holds the keys as rotated by the layer. The paper's code adds the
    same `window - floor(window / group)`. Its later version divides without rounding down, which differs if `window` is
    not a multiple of `group`. Distances are computed from positions; the paper's code uses cache slots. As an extension
    of the paper, distance biases (`alibi`, `t5`) are grouped as well. `group=1` gives the inner scheme.

    Args:
        inner: a rotation proportional to positions (`rope` with any scaling, `p_rope`), a distance bias, or both.
        group: tokens per group, 8 in the official code.
        window: the smallest distance that is grouped, in tokens, 1024 in the official code.
    """

    name: ClassVar[str] = "self_extend"

    group: int = option(8, minimum=1)
    window: int = option(1024, minimum=1)

    def query(self, ids: Tensor) -> Tensor:
        """Returns `floor(i / group) + window - floor(window / group)`."""
        return self.key(ids) + (self.window - self.window // self.group)

    def key(self, ids: Tensor) -> Tensor:
        """`floor(j / group)`."""
        return torch.div(ids, self.group, rounding_mode="floor")
