"""Contextual position encoding (CoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import PairwiseBias, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_integer, check_number


class CopeBias(PairwiseBias):
    """Each query times a learned vector per position, where positions count the keys that the query lets through.

    Args:
        head_dim: width of a query.
        num_positions: rows of the table.
        initial_std: standard deviation of new entries.
    """

    reads_heads = True
    reads_positions = False

    def __init__(self, head_dim: int, num_positions: int, initial_std: float) -> None:
        super().__init__()
        self.initial_std = initial_std
        self.weight = nn.Parameter(torch.empty(num_positions, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every entry from N(0, initial_std)."""
        nn.init.normal_(self.weight, std=self.initial_std)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32."""
        query = pairs.query.float()
        gates = torch.sigmoid(query @ pairs.expanded_key.float().transpose(-1, -2) * pairs.scaling)
        # Slots decide what lies between two tokens; a later key must not be counted.
        gates = gates.masked_fill(pairs.slot_distance > 0, 0.0)
        last = self.weight.shape[0] - 1
        positions = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=last)
        below = positions.detach().floor()
        share = positions - below
        row = below.long()
        products = query @ self.weight.float().transpose(0, 1)
        return products.gather(-1, row) * (1.0 - share) + products.gather(-1, (row + 1).clamp(max=last)) * share


@register_scheme
@dataclass(frozen=True)
class CopeConfig(SchemeConfig):
    """Positions that count only the tokens a query chooses to count (CoPE, arXiv:2405.18719, section 4).

    For query i and key j, with `scaling` the layer's own factor::

        g(i, t)    = sigmoid(scaling * q_i . k_t)
        p(i, j)    = min(g(i, j) + g(i, j + 1) + ... + g(i, i), num_positions - 1)
        bias(i, j) = (1 - s) * q_i . e[floor(p)] + s * q_i . e[floor(p) + 1],    s = p - floor(p)

    `e` is `(num_positions, head_dim)`, shared by the heads of a layer and owned by each layer. Where all gates are
    open, `p = i - j + 1` and this is a learned table of distances. As in the paper's listing, and unlike its eq. 3, the
    gates see logits multiplied with `scaling`; the products with `e` are not. Its variants with keys or values of
    their own for the gates (section 4) are not built. Positions count tokens by content, so position ids are not read.

    The sum runs over keys, so a tensor per pair of tokens is unavoidable. Causal models only: it counts the tokens from
    the key up to the query.

    Args:
        num_positions: rows of the table (`npos_max` in the paper's listing); greater counts share the last one.
        initial_std: standard deviation of new entries. 0, as in the paper's listing, starts without any effect.
    """

    name: ClassVar[str] = "cope"
    per_layer: ClassVar[bool] = True

    num_positions: int = 64
    initial_std: float = 0.0

    def __post_init__(self) -> None:
        check_integer(self, "num_positions", minimum=2)
        check_number(self, "initial_std", minimum=0)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            UnsupportedError: in a bidirectional model.
        """
        if not context.causal:
            raise UnsupportedError(
                "cope counts the tokens from a key up to the query, which says nothing about the later keys that this "
                "bidirectional model attends to. Use 'shaw' or 'transformer_xl'."
            )
        return SchemeParts(logit_bias=CopeBias(context.head_dim, self.num_positions, self.initial_std))
