"""Path-integral additive group representational position encoding (GRAPE-AP)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.alibi import alibi_slopes
from hf_posenc.schemes.parts import AttentionPairs, DeviceConstant, PairwiseBias
from hf_posenc.schemes.rotary.rotation_kernel import RotationFactors, apply_rotation, factors_of_angles
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_WIDTH

_LAYOUT = "half_reversed"


class GrapeApBias(PairwiseBias):
    """A sum of penalties over all tokens after a key, up to the query. Each compares one of them with the query."""

    reads_later_keys = False
    sums_tokens = True

    def __init__(self, config: GrapeApConfig, context: BuildContext) -> None:
        super().__init__()
        num_heads = context.num_heads
        self.num_features = config.width
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device="cpu")
        self._slopes = DeviceConstant(slopes.view(-1, 1, 1))
        shape = (num_heads, config.width, context.input_size)
        # As in the official code.
        deviation = 0.5 * context.input_size**-0.5
        self.projection = self.learned("projection", shape, std=deviation)

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the vector of each token, scaled to a mean square of 1: `(batch, heads, length, width)` float32."""
        return self._scaled(self._projected(hidden_states))

    def features(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `key_features`, and the vector of each token before it is scaled, for the queries."""
        if type(self).key_features is not GrapeApBias.key_features:
            return super().features(hidden_states)
        projected = self._projected(hidden_states)
        return self._scaled(projected), projected

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: if the hidden states or the features of the keys are missing.
        """
        if pairs.hidden_states is None or pairs.key_features is None:
            raise ValueError(
                "grape_ap compares vectors that it computes from hidden states, but this layer does not provide them. "
                "Use a scheme that reads queries and keys, such as 'grape'."
            )
        query = self._projected(pairs.hidden_states) if pairs.query_features is None else pairs.query_features
        products_of = self._products_of_one_query if pairs.is_single else self._products
        products = products_of(query, pairs.key_features, pairs)
        penalties, slopes = nn.functional.logsigmoid(products), self._slopes.on(products.device)
        ones = pairs.ones_from(penalties, 1)
        if ones is not None:
            return penalties @ ones * slopes
        sums = penalties.cumsum(dim=-1)
        return slopes * (sums[..., -1:] - sums)

    def _products(self, query: Tensor, key_features: Tensor, pairs: AttentionPairs) -> Tensor:
        """`p_i . R_l n_l / width` of all pairs. The logarithm of the sigmoid of infinity, of uncounted keys, is 0."""

        def turns() -> RotationFactors:
            angles = pairs.keys.ids[:, None, :, None].float().expand(-1, -1, -1, self.num_features // 2)
            factors = factors_of_angles(angles, _LAYOUT, torch.float32)
            return factors.each(lambda factor: factor / self.num_features)

        name = f"turns of {self.num_features} by position"
        factors = pairs.keys.remembered(name, turns, pairs.keys.ids)
        return pairs.products_of(query, apply_rotation(key_features, factors, _LAYOUT), torch.inf)

    def _products_of_one_query(self, query: Tensor, key_features: Tensor, pairs: AttentionPairs) -> Tensor:
        """The same: all pairs of a key turn by one angle, so the product is a sum of products with the unturned key.

        They are those of the query, times the cosine, and of the query after a quarter turn, times the sine.
        """

        def waves() -> Tensor:
            angles = pairs.keys.ids[:, None, None].float()
            return torch.cat((angles.cos(), angles.sin()), dim=2) / self.num_features

        first, second = query.chunk(2, dim=-1)
        both = torch.cat((first, second, -second, first), dim=-1).view(*query.shape[:2], 2, -1)
        products = both @ key_features.transpose(-1, -2)
        name = f"waves of {self.num_features} by position"
        products = (products * pairs.remembered(name, waves)).sum(-2, keepdim=True)
        return products if pairs.counts_all else products.masked_fill(pairs.uncounted, torch.inf)

    def _scaled(self, projected: Tensor) -> Tensor:
        """The vectors, scaled to a mean square of 1.

        A layer norm of the vector and its negative does that, because their mean is 0. It is one operator, and its
        backward pass is another one.
        """
        both = torch.cat((projected, -projected), dim=-1)
        epsilon = torch.finfo(both.dtype).eps
        return torch.layer_norm(both, both.shape[-1:], eps=epsilon)[..., : self.num_features]

    def _projected(self, hidden_states: Tensor) -> Tensor:
        """`(batch, heads, length, width)` float32."""
        flat = nn.functional.linear(hidden_states.float(), self.projection.float().flatten(0, 1))
        return flat.view(*flat.shape[:2], -1, self.num_features).transpose(1, 2)


@register_scheme
class GrapeApConfig(SchemeConfig):
    """A penalty for every token between key and query, by how that token compares with the query (GRAPE-AP,
    arXiv:2512.07805, section 5).

    For query i and key j of head h, with `p_t = P_h x_t` computed from the layer's input `x_t`::

        bias(i, j) = m_h * sum over l = j + 1, ..., i of log sigmoid(p_i . R_l n_l / width)
        n_l        = p_l / sqrt(mean square of p_l)

    `m_h` are ALiBi's slopes. `R_l` turns every pair of components by `-l` radians, with `l` the position of the token.
    `P`, `(heads, width, hidden)`, is learned per layer. A cache holds `n` of each token in additional channels of its
    key. The width, the initial values, and which vectors are scaled and turned follow the official code; its options
    that tie `p` to queries, keys or values are not implemented. Causal models only.

    The bias of a query is a sum over all earlier tokens, so it is computed for every pair.

    Args:
        width: number of components of `p` in each head; even.
    """

    name: ClassVar[str] = "grape_ap"
    per_layer: ClassVar[bool] = True
    part_class = GrapeApBias
    causal_only = (
        "grape_ap sums penalties over the tokens between an earlier key and the query. This is not defined for "
        "later keys, but this model is bidirectional and attends to them. Use 'grape' or 'alibi'."
    )

    width: int = option(8, minimum=2, maximum=LARGEST_WIDTH, even="pairs are turned")
