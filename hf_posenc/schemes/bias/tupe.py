"""TUPE: untied absolute positions."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.relative_tables import selected_products
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias, Reach, SchemeParts
from hf_posenc.schemes.scale.constant import ConstantScale
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import MOST_ROWS, option, rows_of_table, whole_positions

#: Row 0 of the table is for all pairs whose query is the first token, row 1 for all pairs whose key it is.
_FIRST_ROW = 1


class UntiedPositionBias(PairwiseBias):
    """Products of learned positions, with separate projections."""

    whole_positions = True
    reads_content = False

    def __init__(self, config: TupeConfig, context: BuildContext) -> None:
        super().__init__()
        hidden_size, width = context.hidden_size, context.num_heads * context.head_dim
        num_positions = rows_of_table(config, context.max_positions)
        self.num_heads = context.num_heads
        self.factor = context.head_dim**-0.5
        self.reset_first = not context.causal if config.reset_first is None else config.reset_first
        self.length_reach = Reach(
            num_positions,
            "of the table of 'tupe'. Shorten the input, or patch with a larger num_positions.",
            made_for=num_positions,
        )
        self.weight = self.learned("weight", (num_positions + _FIRST_ROW, hidden_size), std=context.initializer_range)
        self.norm_weight = self.learned("norm_weight", hidden_size, nn.init.ones_)
        self.norm_bias = self.learned("norm_bias", hidden_size, nn.init.zeros_)
        self.query_weight = self.learned("query_weight", (width, hidden_size), std=context.initializer_range)
        self.query_bias = self.learned("query_bias", width, nn.init.zeros_)
        self.key_weight = self.learned("key_weight", (width, hidden_size), std=context.initializer_range)
        self.key_bias = self.learned("key_bias", width, nn.init.zeros_)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32.

        Raises:
            SequenceLengthError: for a position without a vector.
            ValueError: for positions that are not integers.
        """
        ids = pairs.keys.ids
        whole_positions(ids, "tupe")
        self.length_reach.check(pairs.keys)
        indices = ids.clamp(min=0) + _FIRST_ROW
        query = self._queries(self._rows(indices.index_select(-1, pairs.query_slots)))
        bias = self._products(query, indices, pairs)
        if self.reset_first:
            special = self._rows(torch.arange(2, device=ids.device))
            products = (self._queries(special) * self._keys(special)).sum(-1)
            from_first, to_first = products[..., None, None].unbind(1)
            bias = torch.where((ids == 0)[:, None, None, :], to_first, bias)
            bias = torch.where((pairs.query_positions == 0)[:, None, :, None], from_first, bias)
        return bias * self.factor

    def _products(self, query: Tensor, indices: Tensor, pairs: AttentionPairs) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)`. While tokens are decoded, a cache keeps the projected rows."""
        bound = pairs.keys.bound()
        if bound is None or len(pairs.query_slots) > 1:
            return query @ self._keys(self._rows(indices)).transpose(-1, -2)

        def compute() -> Tensor:
            count = min(2 * bound + _FIRST_ROW, len(self.weight))
            return self._keys(self._rows(torch.arange(count, device=indices.device))).transpose(-1, -2)

        keys = pairs.keys.kept(self, "keys", compute, lambda keys: keys.shape[-1] >= bound + _FIRST_ROW)
        return selected_products(query, keys, indices.unsqueeze(-2))

    def _rows(self, indices: Tensor) -> Tensor:
        """`(..., hidden)` float32: the normalised rows of the table."""
        rows = nn.functional.embedding(indices, self.weight).float()
        return nn.functional.layer_norm(rows, rows.shape[-1:], self.norm_weight.float(), self.norm_bias.float())

    def _queries(self, rows: Tensor) -> Tensor:
        return self._heads(nn.functional.linear(rows, self.query_weight.float(), self.query_bias.float()))

    def _keys(self, rows: Tensor) -> Tensor:
        return self._heads(nn.functional.linear(rows, self.key_weight.float(), self.key_bias.float()))

    def _heads(self, projected: Tensor) -> Tensor:
        """`(..., length, heads * head_dim)` -> `(..., heads, length, head_dim)`."""
        return torch.unflatten(projected, -1, (self.num_heads, -1)).transpose(-2, -3)


@register_scheme
class TupeConfig(SchemeConfig):
    """Positions correlate with positions, and words with words (TUPE-A, arXiv:2006.15595, eq. 7 to 10).

    For the query at position i, the key at position j and each head::

        logit(i, j) = (q_i . k_j + p_i U_q . p_j U_k) / sqrt(2 head_dim)

    `p` are learned vectors after a layer norm; `U_q` and `U_k` project them, with offsets as in the authors' code
    (github.com/guolinke/TUPE). All three are shared by the layers. Each of the two products has the variance of a usual
    logit, so the divisor contains a 2.

    In an encoder, the first token is `[CLS]`, which sees everything: pairs with it as the query have one number per
    head, and pairs with it as the key another. TUPE-R adds T5's bias: `["tupe", "t5"]`. In the paper, T5's bias is not
    divided by sqrt(2), as it is here, and has separate buckets for the first token.

    Args:
        num_positions: number of positions with a vector, at most 2**20; `None` takes the model's own length.
        reset_first: whether the first token is treated in this way; `None` does so in bidirectional models.
    """

    name: ClassVar[str] = "tupe"

    num_positions: int | None = option(None, minimum=1, maximum=MOST_ROWS)
    reset_first: bool | None = option(None, optional=True)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias and a logit scale.

        Raises:
            ValueError: if neither the config nor the model specifies the number of positions, or the model specifies
                more than 2**20.
        """
        bias = UntiedPositionBias(self, context)
        return SchemeParts(logit_bias=bias, logit_scale=ConstantScale(1 / math.sqrt(2)))
