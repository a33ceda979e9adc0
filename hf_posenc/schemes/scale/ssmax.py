"""Scalable-Softmax (SSMax)."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.scale.visible_keys import VisibleKeysScale
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR


class SSMaxScale(VisibleKeysScale):
    """`s * log(n) + b` per head."""

    def __init__(self, config: SSMaxConfig, context: BuildContext) -> None:
        super().__init__(context)
        length = config.training_length
        # One over the mean of log(n) for n = 1 .. length.
        initial = config.initial_scale or 1 / (math.lgamma(length + 1) / length)
        self.scale = self.learned("scale", context.num_heads, nn.init.constant_, val=initial)
        self.bias = self.learned("bias", context.num_heads, nn.init.zeros_) if config.bias else None

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads, length)` in float32."""
        logarithm = self.visible_keys(positions).log().unsqueeze(1)
        factor = self.scale.float().unsqueeze(-1) * logarithm
        return factor if self.bias is None else factor + self.bias.float().unsqueeze(-1)


@register_scheme
class SSMaxConfig(SchemeConfig):
    """Logits that grow with the logarithm of the number of keys (Scalable-Softmax, arXiv:2501.19399, its definition).

    The base of the softmax over `n` keys depends on `n`, so that attention does not become flatter as keys are added::

        weight[j] = n ** (s * logit[j]) / sum over k of n ** (s * logit[k])

    which is an ordinary softmax of `(s * log(n)) * logit`; with `bias`, of `(s * log(n) + b) * logit`, a more general
    form that extrapolates worse according to the paper. `s` and `b` are learned per head and layer, shape `(heads,)`.

    `n` is the number of keys that the query attends to: its position plus one in a causal model, the number of real
    tokens in a bidirectional model. As in the paper, where the formula replaces the softmax, all logits of a query are
    scaled, including the bias of another scheme.

    The factor is 0 for the very first token of a causal model, whose softmax has one key and ignores it.

    Args:
        training_length: the length in tokens over which the initial factor has a mean of 1 in a causal model, which
            changes a pretrained model least. 1024 tokens, the length of the paper's models, give `s = 0.168`.
        initial_scale: the initial value of `s`, instead of `training_length`.
        bias: whether to learn `b` too, initialised with 0.
    """

    name: ClassVar[str] = "ssmax"
    per_layer: ClassVar[bool] = True
    part_class = SSMaxScale

    training_length: int = option(1024, minimum=2)
    initial_scale: float | None = option(None, minimum=SMALLEST_FACTOR)
    bias: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_scale is not None and self.training_length != type(self).training_length:
            raise ValueError(
                f"SSMaxConfig has both initial_scale={self.initial_scale} and training_length={self.training_length}, "
                "which both set the initial scale; give only one."
            )
