"""Gated additive group representational position encoding (GRAPE-A)."""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.alibi import alibi_slopes
from hf_posenc.schemes.parts import DeviceConstant, PairwiseBias
from hf_posenc.schemes.positions import AttentionPairs, softplus
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR


class GrapeBias(PairwiseBias):
    """ALiBi with a slope that depends on the key, on the query, or on both."""

    reads_later_keys = False
    reads_heads = True

    def __init__(self, config: GrapeConfig, context: BuildContext) -> None:
        super().__init__()
        num_heads = context.num_heads
        self.normalize = config.normalize
        self._slopes = DeviceConstant(torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device="cpu"))
        # The inverse of softplus.
        self.rate = self.learned("rate", num_heads, nn.init.constant_, val=math.log(math.expm1(config.initial_rate)))
        drawn = functools.partial(self.learned, shape=(num_heads, context.head_dim), std=context.head_dim**-0.5)
        self.direction = drawn("direction") if config.gates != "query" else None
        self.query_direction = drawn("query_direction") if config.gates != "key" else None

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32."""
        slope, of_keys, of_queries = pairs.keys.of_weights(self, "weights", lambda layers: layers.stacked()._weights())
        gate: Tensor | float = 0.0
        if of_keys is not None:
            gate = softplus(of_keys @ pairs.expanded_key.float().transpose(-1, -2))
        if of_queries is not None:
            gate = gate + softplus(of_queries @ pairs.query.float().transpose(-1, -2)).transpose(-1, -2)
        return pairs.steps.unsqueeze(1) * (slope * gate)

    def _weights(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Minus the slopes, and the directions of keys and queries, all `(..., heads, 1, 1 or head_dim)` float32."""
        slope = -softplus(self.rate.float()) * self._slopes.on(self.rate.device)
        return slope[..., None, None], self._unit(self.direction), self._unit(self.query_direction)

    def _unit(self, direction: Tensor | None) -> Tensor | None:
        if direction is None:
            return None
        direction = direction.float()
        if self.normalize:
            direction = nn.functional.normalize(direction, dim=-1, eps=1e-6)
        return (direction * direction.shape[-1] ** -0.5).unsqueeze(-2)


@register_scheme
class GrapeConfig(SchemeConfig):
    """A linear penalty on distance with a slope that depends on the content (gated GRAPE-A, arXiv:2512.07805, section
    4).

    For position i of the query, j of the key and head h::

        bias(i, j) = -|i - j| * m_h * softplus(rate_h) * gate(i, j)
        gate(i, j) = softplus(u_h . k_j / sqrt(head_dim))                                             gates="key"
                   = softplus(v_h . q_i / sqrt(head_dim))                                             gates="query"
                   = softplus(u_h . k_j / sqrt(head_dim)) + softplus(v_h . q_i / sqrt(head_dim))      gates="both"

    `m_h` are ALiBi's slopes. `rate`, `(heads,)`, and the directions `u` and `v`, `(heads, head_dim)`, are learned per
    layer; directions are scaled to length 1 by default. If the last two factors are 1, this is ALiBi. The slopes, the
    factor `1 / sqrt(head_dim)` and the unit directions follow the official code (the paper's penalty is `rate_h *
    softplus(u_h . k_j)`). Queries and keys are those used in attention, after any normalisation.

    The paper covers causal models. In bidirectional models the penalty grows in both directions, like the symmetric
    form of ALiBi.

    Args:
        initial_rate: the initial value of `softplus(rate)`.
        normalize: whether directions are scaled to length 1.
        gates: "key", "query" or "both".
    """

    name: ClassVar[str] = "grape"
    per_layer: ClassVar[bool] = True
    part_class = GrapeBias

    # Beyond 700 the inverse of softplus overflows.
    initial_rate: float = option(1.0, minimum=SMALLEST_FACTOR, maximum=100)
    normalize: bool = option(True)
    gates: str = option("key", choices=("key", "query", "both"))
