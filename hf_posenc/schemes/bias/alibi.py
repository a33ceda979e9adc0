"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.grids import GridBias
from hf_posenc.schemes.parts import DeviceConstant, DistanceBias, LogitBias, Positions, SchemeParts
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.weights import copied_

#: Added to keys that a head of the asymmetric form must not see. Its exponential is zero relative to any visible key (a
#: token always sees itself), but a row in which all keys have this value, such as padding, keeps a finite softmax.
AWAY_BIAS = -10000.0


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head (arXiv:2108.12409, section 3, and the paper's code for other head counts).

    For a power of two, `2**(-8 h / num_heads)` with `h = 1 .. num_heads`. Otherwise the slopes of the next lower power
    of two, followed by every other slope of its double.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-4 * head / lower) for head in range(1, 2 * lower + 1, 2)]
    return slopes + between[: num_heads - lower]


class AlibiSlopes(LogitBias):
    """`-slope * distance` per head, with fixed or learned slopes. Learned slopes are stored as logarithms so that they
    stay positive.
    """

    # Weight decay would pull the logarithms to 0 and every slope to 1, which restricts attention to the nearest tokens.
    no_weight_decay = frozenset({"log_slopes"})

    def __init__(self, config: AlibiConfig, context: BuildContext) -> None:
        super().__init__()
        self.axes = config.axes
        # The first half of the heads attend to the left and the others to the right.
        self.num_left = (context.num_heads + 1) // 2 if config.variant == "asymmetric" else None
        slopes = alibi_slopes(context.num_heads)
        if self.num_left is not None:
            slopes = alibi_slopes(self.num_left) + alibi_slopes(context.num_heads - self.num_left)
        self._initial_slopes = DeviceConstant(torch.tensor(slopes, dtype=torch.float32, device="cpu"))
        self.log_slopes: nn.Parameter | None = None
        if config.learnable:
            initial = self._initial_slopes.on(torch.device("cpu")).log()
            self.log_slopes = self.learned("log_slopes", len(slopes), copied_, values=initial)

    @property
    def slopes(self) -> Tensor:
        """Returns the current slopes, `(heads,)` float32, on the device of the parameter or on the CPU."""
        return self.slopes_on(torch.device("cpu"))

    def slopes_on(self, device: torch.device) -> Tensor:
        """Returns the current slopes, `(heads,)` float32; fixed ones are on `device`."""
        return self._initial_slopes.on(device) if self.log_slopes is None else self.log_slopes.float().exp()

    def _penalty(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32, for integers or real numbers."""
        return -distance.abs().float() * self.slopes_on(distance.device).view(-1, *(1 for _ in distance.shape))


class AlibiBias(AlibiSlopes, DistanceBias):
    """The penalty on the distance in the order of tokens, in both directions or in one."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        bias = self._penalty(distance)
        if self.num_left is None:
            return bias
        left = bias[: self.num_left].masked_fill(distance > 0, AWAY_BIAS)
        right = bias[self.num_left :].masked_fill(distance < 0, AWAY_BIAS)
        return torch.cat((left, right))

    def slopes_behind(self, device: torch.device) -> Tensor | None:
        """`(heads,)` float32, or `None` for the asymmetric form, in which half of the heads see no earlier keys."""
        return None if self.num_left is not None else self.slopes_on(device)


class GridAlibiBias(AlibiSlopes, GridBias):
    """The penalty on the Euclidean distance of two places."""

    scheme = "alibi"

    def of_distances(self, distances: Tensor, keys: Positions) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        # Squares of whole numbers are exact in float32 up to a distance of 4096 on each axis.
        return self._penalty(distances.float().square().sum(0).sqrt()).transpose(0, 1)


@register_scheme
class AlibiConfig(SchemeConfig):
    """A fixed linear penalty on distance, added to the attention logits (ALiBi, arXiv:2108.12409, section 3).

    For query i and key j of head h = 1 .. heads::

        bias(i, j) = -slope_h * |j - i|
        slope_h    = 2 ** (-8h / heads)        if the number of heads is a power of two

    For other head counts it takes the slopes of the next lower power of two, then every other slope of twice that
    number, as in the paper's code. With "asymmetric" (the authors' proposal for encoders), the first `ceil(heads / 2)`
    heads attend only to the left and the others only to the right. A key on the other side of the query gets a bias of
    -10000, every token sees itself, and each half has the slopes of an ALiBi with that many heads.

    With `axes=2` the distance is that of two patches in the plane (2D-ALiBi of CROMA, arXiv:2311.00566)::

        bias(i, j) = -slope_h * sqrt((row_j - row_i)**2 + (column_j - column_i)**2)

    and with `axes=3` the frame is a third coordinate. The bias of a token without a place (a class or register token)
    and any other is 0. CROMA has no such tokens.

    Args:
        variant: "auto" is "causal" in a causal model and "symmetric" in a bidirectional model. "causal" requires a
            causal model and "asymmetric" a bidirectional one.
        learnable: trains the slopes, as logarithms and without weight decay, starting from the fixed slopes. Fixed
            slopes are float32 in any model. Learned slopes have the dtype of the model, and bfloat16 rounds the
            logarithms of small slopes by up to 1.6 %. To train them, keep the model's parameters in float32 (autocast).
        axes: 1 for the order of the tokens, 2 for (row, column), 3 for (frame, row, column) of the model. Several axes
            have only the variants "auto" and "symmetric".
    """

    name: ClassVar[str] = "alibi"

    variant: str = option("auto", choices=("auto", "causal", "symmetric", "asymmetric"))
    learnable: bool = option(False)
    axes: int = option(1, minimum=1, maximum=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes > 1 and self.variant in ("causal", "asymmetric"):
            raise ValueError(
                f"AlibiConfig.variant is {self.variant!r}, which distinguishes earlier and later tokens, but on "
                f"{self.axes} axes no token is earlier than another. Use 'symmetric' or 'auto', or axes=1."
            )

    @property
    def part_class(self) -> type[AlibiSlopes]:  # type: ignore[override]
        """The penalty in the order of tokens, or on a grid."""
        return AlibiBias if self.axes == 1 else GridAlibiBias

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            UnsupportedError: for the variant "causal" in a bidirectional model.
            ValueError: for the variant "asymmetric" in a causal model, or with a single head.
        """
        if self.variant == "causal" and not context.causal:
            raise UnsupportedError(
                "AlibiConfig.variant is 'causal', which is not defined for later keys, but this model is "
                "bidirectional and attends to them. Use 'symmetric', 'asymmetric' or 'auto'."
            )
        if self.variant == "asymmetric" and context.causal:
            raise ValueError(
                "AlibiConfig.variant is 'asymmetric', which uses half of the heads for later keys, but this causal "
                "model does not attend to them. Use 'causal' or 'auto'."
            )
        if self.variant == "asymmetric" and context.num_heads < 2:
            raise ValueError("AlibiConfig.variant is 'asymmetric', which needs at least 2 heads. Use 'symmetric'.")
        return super().build(context)
