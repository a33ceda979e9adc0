"""Translation-invariant self-attention (TISA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_WIDTH
from hf_posenc.schemes.weights import stacked


class TisaBias(DistanceBias):
    """A sum of learned Gaussian bumps over the distance, for each head."""

    def __init__(self, config: TisaConfig, context: BuildContext) -> None:
        super().__init__()
        shape = (context.num_heads, config.num_kernels)
        self.amplitudes = nn.Parameter(torch.empty(shape))
        self.sharpness = nn.Parameter(torch.empty(shape))
        self.offsets = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws amplitudes and sharpness from N(0.1, 0.01^2) and offsets from N(0, 5^2), as the released code does."""
        nn.init.normal_(self.amplitudes, mean=0.1, std=0.01)
        nn.init.normal_(self.sharpness, mean=0.1, std=0.01)
        nn.init.normal_(self.offsets, std=5.0)

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        axes = (*self.offsets.shape, *(1 for _ in distance.shape))
        amplitudes, sharpness, offsets = (
            parameter.float().view(axes) for parameter in (self.amplitudes, self.sharpness, self.offsets)
        )
        bumps = amplitudes * torch.exp(-sharpness.abs() * (distance.float() - offsets).square())
        return bumps.sum(-1 - distance.ndim)

    @classmethod
    def of_layers(cls, layers: Sequence[TisaBias], distance: Tensor) -> Tensor:
        """The biases of several layers, `(layers, heads, *distance.shape)`."""
        return stacked(layers).forward(distance)


@register_scheme
class TisaConfig(SchemeConfig):
    """Gaussian bumps over the distance as a bias (TISA, arXiv:2106.01950).

    For key position minus query position `d`, with the amplitude `a`, the sharpness `b` and the offset `c` of each of
    the bumps of a head::

        bias(d) = sum over s of a_s * exp(-|b_s| * (d - c_s) ** 2)

    `a`, `b` and `c` have shape `(heads, num_kernels)` and are learned per layer. The paper's models share all layers,
    including the bumps. The initial values are those of the released code. There, `d` is the query position minus
    the key position minus one, which only renames the learned offsets. Keys before and after the query have different
    biases, so encoders can distinguish them. Far from all offsets the bias is 0.

    Args:
        num_kernels: bumps per head; 5 in the paper.
    """

    name: ClassVar[str] = "tisa"
    per_layer: ClassVar[bool] = True
    part_class = TisaBias

    num_kernels: int = option(5, minimum=1, maximum=LARGEST_WIDTH)
