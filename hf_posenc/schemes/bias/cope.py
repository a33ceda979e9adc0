"""Contextual position encoding (CoPE)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import MOST_DISTANCES
from hf_posenc.schemes.weights import traced


class CopeBias(PairwiseBias):
    """The product of each query with a learned vector per position. Positions count keys that pass its gates."""

    whole_heads = False
    reads_later_keys = False
    reads_heads = True
    reads_positions = False
    sums_tokens = True

    def __init__(self, config: CopeConfig, context: BuildContext) -> None:
        super().__init__()
        shape = (config.num_positions, context.head_dim)
        self.weight = self.learned("weight", shape, std=config.initial_std)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32."""
        query, factor = pairs.query.float(), pairs.query_factor
        if isinstance(factor, Tensor) or factor != 1:
            query = query / factor
        products = query @ self.weight.float().t()
        last = products.shape[-1] - 1
        if not traced() and pairs.key.shape[-2] < last:
            # No query counts up to the last row.
            far, positions = 0, self._counted(pairs, 0)
            row, share = positions.long(), positions.frac()
        else:
            far = self._keys_beyond_the_table(pairs)
            positions = self._positions(pairs, far)
            row = positions.long().clamp(0, last - 1)
            share = positions - row
        near = torch.lerp(products.gather(-1, row), products.gather(-1, row + 1), share)
        return near if far == 0 else torch.cat((products[..., -1:].expand(-1, -1, -1, far), near), dim=-1)

    def _positions(self, pairs: AttentionPairs, first: int) -> Tensor:
        """`(batch, heads, query_len, key_len - first)`: the rows of the table at each key from `first` on."""
        return self._counted(pairs, first).clamp(max=self.weight.shape[0] - 1)

    def _counted(self, pairs: AttentionPairs, first: int) -> Tensor:
        """`(batch, heads, query_len, key_len - first)`: what the queries count up to each key from `first` on."""
        # The slots determine which tokens are between two tokens. Later keys and padding must not be counted.
        key = pairs.expanded_key.float()
        key = key[..., first:, :] if first else key
        logits = pairs.products_of(pairs.query.float(), key, -torch.inf, pairs.scaling)
        gates = torch.sigmoid(logits)
        ones = pairs.ones_from(gates, 0)
        return gates.flip(-1).cumsum(dim=-1).flip(-1) if ones is None else gates @ ones

    def _keys_beyond_the_table(self, pairs: AttentionPairs) -> int:
        """Returns how many leading keys are at the table's last row for every query.

        Positions increase with the distance from the query. Once all of them have reached the last row, the gates of
        earlier keys do not matter. The function reads only as many keys as needed.
        """
        # A graph must not depend on the result, a Python number.
        if torch.compiler.is_compiling() or 4 * self.weight.shape[0] >= pairs.key.shape[-2]:
            return 0
        if not pairs.query.is_cpu or pairs.query.numel() == 0:
            # The result is a Python number, for which a device would have to be waited for.
            return 0
        oldest, newest = int(pairs.query_slots[0]), int(pairs.query_slots[-1]) + 1
        # The distance before the oldest of these queries if half of the gates are open, with some margin.
        reach = newest - oldest + 4 * self.weight.shape[0]
        while reach < newest:
            first = newest - reach
            with torch.no_grad():
                reached = self._positions(pairs, first) >= self.weight.shape[0] - 1
            everywhere = reached.flatten(0, -2).all(0)
            if bool(everywhere[0]):
                return first + int(everywhere.long().cumprod(0).sum())
            reach *= 2
        return 0


@register_scheme
class CopeConfig(SchemeConfig):
    """Positions that count only the tokens selected by the gates of a query (CoPE, arXiv:2405.18719, section 4).

    For query i and key j, with `scaling` the layer's own factor::

        g(i, t)    = sigmoid(scaling * q_i . k_t)
        p(i, j)    = min(g(i, j) + g(i, j + 1) + ... + g(i, i), num_positions - 1)
        bias(i, j) = (1 - s) * q_i . e[floor(p)] + s * q_i . e[floor(p) + 1],    s = p - floor(p)

    `e` is `(num_positions, head_dim)`, shared by the heads of a layer; every layer has its own. If all gates are open,
    `p = i - j + 1`, and this is a learned table of distances. As in the paper's listing, and unlike its eq. 3,
    `scaling` is applied to the logits of the gates but not to the products with `e`. The variants with separate keys or
    values for the gates (section 4) are not implemented. Positions count tokens by content, so position ids are not
    used.

    The sum runs over keys, so a value per pair of tokens is unavoidable. Causal models only, because it counts the
    tokens from the key up to the query.

    Args:
        num_positions: rows of the table (`npos_max` in the paper's listing), at most 2**16; greater counts share the
            last row.
        initial_std: standard deviation of new entries. With 0, as in the paper's listing, the scheme initially has no
            effect.
    """

    name: ClassVar[str] = "cope"
    per_layer: ClassVar[bool] = True
    part_class = CopeBias
    causal_only = (
        "cope counts the tokens from a key up to the query. This is not defined for later keys, but this "
        "model is bidirectional and attends to them. Use 'shaw' or 'transformer_xl'."
    )

    num_positions: int = option(64, minimum=2, maximum=MOST_DISTANCES)
    initial_std: float = option(0.0, minimum=0)
