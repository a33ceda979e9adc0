"""Relative positions as wavelets."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.bias.relative_tables import (
    RICKER_SUPPORT,
    clipped_rows,
    products_of_rows,
    ricker_wavelets,
)
from hf_posenc.schemes.parts import AttentionPairs, DeviceConstant, PairwiseBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme


class WaveletBias(PairwiseBias):
    """The product of each query with the values of Ricker wavelets at the distance.

    Beyond `RICKER_SUPPORT` times the largest scale all wavelets vanish, so a bounded table covers all distances.
    """

    whole_heads = False
    reads_later_keys = False
    reads_heads = True

    def __init__(self, config: WaveletConfig, context: BuildContext) -> None:
        super().__init__()
        num_scales = config.num_scales
        num_shifts, left_over = divmod(context.head_dim, num_scales)
        if left_over:
            raise ValueError(
                f"WaveletConfig.num_scales is {num_scales}, which does not divide the head width of "
                f"{context.head_dim}: every scale needs the same number of shifts. Choose a divisor."
            )
        scales = [2.0**scale for scale in range(num_scales) for _ in range(num_shifts)]
        shifts = [float(shift) for _ in range(num_scales) for shift in range(num_shifts)]
        reach = math.ceil(RICKER_SUPPORT * max(scales))
        # The outermost rows are already zero, so clipping distances to them is exact.
        self.first = -reach
        self.last = reach + math.ceil(max(shifts))
        family = torch.tensor([scales, shifts], dtype=torch.float32, device="cpu")
        self._family = DeviceConstant(family)
        distances = torch.arange(self.first, self.last + 1, device="cpu")
        self._table = DeviceConstant(ricker_wavelets(distances, *family))

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32."""
        if pairs.keys.ids.is_floating_point():
            return self._at_real_distances(pairs.query.float(), -pairs.distance) * pairs.query_scaling
        rows, occurring = clipped_rows(pairs, self.first, self.last, back=True)
        return products_of_rows(self, pairs, self._table.on(pairs.query.device), rows, occurring)

    def _at_real_distances(self, query: Tensor, distance: Tensor) -> Tensor:
        """Evaluates one wavelet at a time, to avoid storing a vector per pair."""
        scales, shifts = self._family.on(query.device)
        total = query.new_zeros(*query.shape[:-1], distance.shape[-1])
        for component in range(query.shape[-1]):
            column = slice(component, component + 1)
            wavelet = ricker_wavelets(distance, scales[column], shifts[column]).squeeze(-1)
            total = total + query[..., column] * wavelet.unsqueeze(1)
        return total


@register_scheme
class WaveletConfig(SchemeConfig):
    """Multiplies queries with Ricker wavelets of the distance, at several scales and shifts (arXiv:2502.02004, section
    4).

    With `scaling` the layer's own factor (`head_dim ** -0.5` in the paper) and position i of the query, j of the key::

        bias(i, j) = scaling * q_i . psi(i - j)
        psi_c(d)   = (1 - u**2) * exp(-u**2 / 2),    u = (d - b_c) / a_c

    It is Shaw's bias (eq. 4 of arXiv:1803.02155) with a fixed table that needs no clipping; nothing is learned. The
    dimensions of a head hold all pairs of a scale `a = 2**0, 2**1, ..., 2**(num_scales - 1)` and a shift `b = 0, 1,
    ..., head_dim / num_scales - 1`: dimension c has scale number `c // (head_dim / num_scales)` and shift `c %
    (head_dim / num_scales)`. With a positive shift, a wavelet is centred on an earlier key. No official code is known.
    Another order of the dimensions would only permute those of the query projection.

    Args:
        num_scales: number of scales; must divide the width of a head. The paper uses 8 for heads of 128 dimensions,
            which gives 16 shifts. At most 12, because the table of distances is 14 times as long as the largest scale.
    """

    name: ClassVar[str] = "wavelet"
    part_class = WaveletBias

    num_scales: int = option(8, minimum=1, maximum=12)
