"""The bias that keeps only the inner products of sinusoidal vectors (Sandwich)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.bias.relative_tables import angles_of_turns, turn_frequencies
from hf_posenc.schemes.parts import DeviceConstant, DistanceBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import LARGEST_WIDTH, check_base, option


class SandwichBias(DistanceBias):
    """A fixed sum of cosines of the distance, with one factor per head."""

    def __init__(self, config: SandwichConfig, context: BuildContext) -> None:
        super().__init__()
        heads = torch.arange(1, context.num_heads + 1, dtype=torch.float64, device="cpu")
        self._factors = DeviceConstant((context.num_heads / (8 * heads)).float())
        self._frequencies = turn_frequencies(config.width, config.base)

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        product = angles_of_turns(distance.abs(), self._frequencies).cos().sum(-1)
        return self._factors.on(distance.device).view(-1, *(1 for _ in distance.shape)) * product


@register_scheme
class SandwichConfig(SchemeConfig):
    """The product of two sinusoidal vectors as a bias, without the token content (Sandwich, arXiv:2212.10356).

    For query i and key j of head h = 1 .. heads, with `PE` the sinusoidal vectors of `width` components::

        bias(i, j) = heads / (8h) * PE(i) . PE(j)
                   = heads / (8h) * (sum over n < width / 2 of cos((i - j) * base ** (-2n / width)))

    Factors, width and base follow the paper's appendix E. Nothing is learned. The bias first falls with distance and
    then oscillates around low values. It is symmetric, so encoders can use it.

    Args:
        width: components of the vectors, even, at most 4096; 128 in the paper.
        base: the base of the frequencies, 10000 as in `sinusoidal`.
    """

    name: ClassVar[str] = "sandwich"
    part_class = SandwichBias

    width: int = option(128, minimum=2, maximum=LARGEST_WIDTH, even="each cosine is paired with a sine")
    base: float = option(10000.0, check_base)
