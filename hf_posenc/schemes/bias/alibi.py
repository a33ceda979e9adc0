"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.constants import DeviceConstant
from hf_posenc.schemes.parts import DistanceBias, SchemeParts
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_boolean, check_choice

#: Added where a head of the asymmetric form must not look. Its exponential is zero beside any visible key (a token
#: always sees itself), yet a row in which every key carries it, as padding rows may, keeps a finite softmax.
AWAY_BIAS = -10000.0


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head (arXiv:2108.12409, section 3, and the paper's code for other head counts).

    For a power of two, `2**(-8 h / num_heads)` with `h = 1 .. num_heads`. Otherwise the slopes of the next lower power
    of two, followed by every other slope of its double.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-4 * head / lower) for head in range(1, 2 * lower + 1, 2)]
    return slopes + between[: num_heads - lower]


class AlibiBias(DistanceBias):
    """`-slope * |distance|` per head, for heads that look both ways or only one.

    Args:
        num_heads: number of query heads.
        asymmetric: the first `ceil(heads / 2)` heads look to the left and the others to the right.
        learnable: whether the slopes are trained, as logarithms so that they stay positive.
    """

    # Decay would pull the logarithms to 0, that is, every slope to 1 and the model to its nearest tokens.
    no_weight_decay = frozenset({"log_slopes"})

    def __init__(self, num_heads: int, asymmetric: bool, learnable: bool) -> None:
        super().__init__()
        self.num_left = (num_heads + 1) // 2 if asymmetric else None
        slopes = alibi_slopes(num_heads)
        if self.num_left is not None:
            slopes = alibi_slopes(self.num_left) + alibi_slopes(num_heads - self.num_left)
        self._initial_slopes = DeviceConstant(torch.tensor(slopes, dtype=torch.float32, device="cpu"))
        self.log_slopes: nn.Parameter | None = None
        if learnable:
            self.log_slopes = nn.Parameter(torch.empty(num_heads))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets learned slopes back to ALiBi's own."""
        if self.log_slopes is not None:
            self.log_slopes.copy_(self._initial_slopes.on(self.log_slopes.device).log())

    @property
    def slopes(self) -> Tensor:
        """`(heads,)` float32, the slopes in force, on the device of the parameter or on the CPU."""
        if self.log_slopes is not None:
            return self.log_slopes.float().exp()
        return self._initial_slopes.on(torch.device("cpu"))

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        slopes = self.slopes if self.log_slopes is not None else self._initial_slopes.on(distance.device)
        bias = -distance.abs().float() * slopes.view(-1, *(1 for _ in distance.shape))
        if self.num_left is None:
            return bias
        left = bias[: self.num_left].masked_fill(distance > 0, AWAY_BIAS)
        right = bias[self.num_left :].masked_fill(distance < 0, AWAY_BIAS)
        return torch.cat((left, right))

    def slopes_behind(self, device: torch.device) -> Tensor | None:
        """`(heads,)` float32; `None` for the asymmetric form, half of whose heads see nothing behind."""
        if self.num_left is not None:
            return None
        return self.slopes if self.log_slopes is not None else self._initial_slopes.on(device)


@register_scheme
@dataclass(frozen=True)
class AlibiConfig(SchemeConfig):
    """A fixed linear penalty on distance, added to the attention logits (ALiBi, arXiv:2108.12409, section 3).

    For query i and key j of head h = 1 .. heads::

        bias(i, j) = -slope_h * |j - i|        slope_h = 2 ** (-8h / heads) for a power of two

    For other head counts it takes the slopes of the next lower power of two, then every other one of its double, as the
    paper's code does. "asymmetric"
    (the authors' proposal for encoders) lets the first `ceil(heads / 2)` heads look only to the left and the others
    only to the right: a key on the other side of the query gets -10000 instead, every token sees itself, and each half
    has the slopes of an ALiBi with that many heads.

    Args:
        variant: "auto" is "causal" in a causal model and "symmetric" in a bidirectional one; "causal" and "asymmetric"
            only make sense in a causal and a bidirectional one respectively.
        learnable: trains the slopes, as logarithms and without weight decay, starting from the fixed ones. Fixed slopes
            are float32 in any model; learned ones have the dtype of the model, and bfloat16 rounds the logarithms of
            small slopes by up to 1.6 %. Keep such a model's parameters in float32 (autocast) to train them.
    """

    name: ClassVar[str] = "alibi"

    variant: str = "auto"
    learnable: bool = False

    def __post_init__(self) -> None:
        check_choice(self, "variant", ("auto", "causal", "symmetric", "asymmetric"))
        check_boolean(self, "learnable")

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            UnsupportedError: for the variant "causal" in a bidirectional model.
            ValueError: for the variant "asymmetric" in a causal model, or with a single head.
        """
        if self.variant == "causal" and not context.causal:
            raise UnsupportedError(
                "AlibiConfig.variant is 'causal', which says nothing about the later keys that this bidirectional "
                "model attends to. Use 'symmetric', 'asymmetric' or 'auto'."
            )
        if self.variant == "asymmetric" and context.causal:
            raise ValueError(
                "AlibiConfig.variant is 'asymmetric', which gives half of the heads to later keys, but this causal "
                "model never attends to them. Use 'causal' or 'auto'."
            )
        if self.variant == "asymmetric" and context.num_heads < 2:
            raise ValueError("AlibiConfig.variant is 'asymmetric', which needs at least 2 heads. Use 'symmetric'.")
        return SchemeParts(logit_bias=AlibiBias(context.num_heads, self.variant == "asymmetric", self.learnable))
