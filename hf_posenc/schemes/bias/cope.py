"""Contextual position encoding (CoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.limits import MOST_DISTANCES
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

    whole_heads = False
    reads_later_keys = False
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
        last = self.weight.shape[0] - 1
        products = query @ self.weight.float().transpose(0, 1)
        far = self._keys_beyond_the_table(pairs)
        positions = self._positions(pairs, far)
        below = positions.detach().floor()
        share = positions - below
        row = below.long()
        near = torch.lerp(products.gather(-1, row), products.gather(-1, (row + 1).clamp(max=last)), share)
        if far == 0:
            return near
        return torch.cat((products[..., last:].expand(-1, -1, -1, far), near), dim=-1)

    def _positions(self, pairs: AttentionPairs, first: int) -> Tensor:
        """`(batch, heads, query_len, key_len - first)`: what the queries count up to each key from `first` on."""
        key = pairs.expanded_key[..., first:, :].float()
        gates = torch.sigmoid(pairs.query.float() @ key.transpose(-1, -2) * pairs.scaling)
        # Slots decide what lies between two tokens; neither a later key nor padding must be counted.
        uncounted = pairs.remembered(
            f"uncounted from {first}",
            lambda: (pairs.slot_distance[:, first:] > 0) | pairs.keys.padding[:, None, :, first:],
        )
        gates = gates.masked_fill(uncounted, 0.0)
        return gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=self.weight.shape[0] - 1)

    @torch.no_grad()
    def _keys_beyond_the_table(self, pairs: AttentionPairs) -> int:
        """How many keys from the first on stand at the table's last row for every query.

        Positions only grow away from the query, so once all of them have reached the last row, no gate in front of
        there matters. Reads as many keys as it takes.
        """
        if torch.compiler.is_compiling() or pairs.query.device.type != "cpu" or pairs.query.numel() == 0:
            # The answer is a number that a graph cannot hold, and that an accelerator would have to be waited for.
            return 0
        if 4 * self.weight.shape[0] >= pairs.key.shape[-2]:
            return 0
        oldest, newest = int(pairs.query_slots[0]), int(pairs.query_slots[-1]) + 1
        # With half of the gates open, and some to spare, this far before the oldest of these queries.
        reach = newest - oldest + 4 * self.weight.shape[0]
        while reach < newest:
            first = newest - reach
            reached = self._positions(pairs, first) >= self.weight.shape[0] - 1
            everywhere = reached.flatten(0, -2).all(0)
            if bool(everywhere[0]):
                return first + int(everywhere.long().cumprod(0).sum())
            reach *= 2
        return 0


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
        num_positions: rows of the table (`npos_max` in the paper's listing), at most 2**16; greater counts share
            the last one.
        initial_std: standard deviation of new entries. 0, as in the paper's listing, starts without any effect.
    """

    name: ClassVar[str] = "cope"
    per_layer: ClassVar[bool] = True

    num_positions: int = 64
    initial_std: float = 0.0

    def __post_init__(self) -> None:
        check_integer(self, "num_positions", minimum=2, maximum=MOST_DISTANCES)
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
