"""Kernelised relative positions (KERPLE)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.scheme import BuildContext, SharedConfig, option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR
from hf_posenc.schemes.weights import projected

#: Up to this exponent `-|d|**p` is conditionally positive definite, which the paper requires.
LARGEST_EXPONENT = 2.0


class KerpleBias(DistanceBias):
    """`-r1 * log(1 + r2 * |distance|)` or `-r1 * |distance| ** r2`, with both parameters learned per head."""

    no_weight_decay = frozenset({"r1", "r2"})

    def __init__(self, config: KerpleConfig, context: BuildContext) -> None:
        super().__init__()
        self.variant = config.variant
        self.exponent = config.exponent
        self.minimum = config.minimum
        self.r1 = self.learned("r1", context.num_heads, nn.init.uniform_, b=2.0 if self.variant == "log" else 1.0)
        self.r2: nn.Parameter | None = None
        if config.exponent is None:
            self.r2 = self.learned("r2", context.num_heads, nn.init.uniform_, b=1.0 if self.variant == "log" else 2.0)

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        steps = distance.abs().float()
        axes = (-1, *(1 for _ in distance.shape))
        r1 = projected(self.r1.float(), self.minimum, torch.inf).view(axes)
        if self.exponent is not None:
            return -r1 * steps**self.exponent
        assert self.r2 is not None
        largest = LARGEST_EXPONENT if self.variant == "power" else torch.inf
        r2 = projected(self.r2.float(), self.minimum, largest).view(axes)
        return -r1 * (torch.log1p(r2 * steps) if self.variant == "log" else steps**r2)


@register_scheme
class KerpleConfig(SharedConfig):
    """A learned logarithmic or power-law penalty on distance (KERPLE, arXiv:2205.09921, section 4).

    For key position minus query position `d` and two learned numbers per head::

        log:    bias(d) = -r1 * log(1 + r2 * |d|)     r1, r2 > 0
        power:  bias(d) = -r1 * |d| ** r2             r1 > 0, 0 < r2 <= 2

    `r1` and `r2` have shape `(heads,)`. The bias is symmetric, so encoders can use it too.

    The paper only gives these inequalities. The other details follow the released code: both parameters are clamped to
    at least `minimum` (the exponent to at most 2) before use, start from `r1 ~ U(0, 2)` and `r2 ~ U(0, 1)` in the log
    form and from `r1 ~ U(0, 1)` and `r2 ~ U(0, 2)` in the power form, are shared by all layers, and are trained without
    weight decay. The released code overwrites a parameter that leaves its range. Here the parameter is kept, clamped
    when it is used, and receives only gradients that lead back into the range.

    Args:
        variant: "log" (the better one in the paper) or "power".
        exponent: fixes `r2` of the power form instead of learning it; 1.0 is ALiBi with learned slopes.
        minimum: lower bound of `r1` and `r2`. ALiBi's smallest slope, 1 / 256, is below the default.
        shared: whether all layers share one pair of parameters per head; with `False` every layer has its own.
    """

    name: ClassVar[str] = "kerple"
    part_class = KerpleBias

    variant: str = option("log", choices=("log", "power"))
    exponent: float | None = option(None, minimum=SMALLEST_FACTOR, maximum=LARGEST_EXPONENT)
    minimum: float = option(0.01, minimum=SMALLEST_FACTOR, maximum=1.0)
    shared: bool = option(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exponent is not None and self.variant != "power":
            raise ValueError(
                f"KerpleConfig.exponent is {self.exponent}, but variant {self.variant!r} has no exponent. "
                "Use variant='power', or omit exponent."
            )
