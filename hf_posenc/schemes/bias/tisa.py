"""Translation-invariant self-attention (TISA)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_WIDTH
from hf_posenc.schemes.weights import of_stacked


class TisaBias(DistanceBias):
    """A sum of learned Gaussian bumps over the distance, for each head."""

    def __init__(self, config: TisaConfig, context: BuildContext) -> None:
        super().__init__()
        shape = (context.num_heads, config.num_kernels)
        # As in the released code.
        self.amplitudes = self.learned("amplitudes", shape, nn.init.normal_, mean=0.1, std=0.01)
        self.sharpness = self.learned("sharpness", shape, nn.init.normal_, mean=0.1, std=0.01)
        self.offsets = self.learned("offsets", shape, std=5.0)

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        axes = (*self.offsets.shape, *(1 for _ in distance.shape))
        parameters = (self.amplitudes, self.sharpness, self.offsets)
        amplitudes, sharpness, offsets = (parameter.float().view(axes) for parameter in parameters)
        bumps = amplitudes * torch.exp(-sharpness.abs() * (distance.float() - offsets).square())
        return bumps.sum(-1 - distance.ndim)

    of_layers = staticmethod(of_stacked)


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
