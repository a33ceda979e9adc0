"""Path-integral additive group representational position encoding (GRAPE-AP)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.alibi import alibi_slopes
from hf_posenc.schemes.parts import AttentionPairs, DeviceConstant, PairwiseBias
from hf_posenc.schemes.positions import Positions, traced
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
        return nn.functional.rms_norm(self._projected(hidden_states), (self.num_features,))

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
        single = pairs.query.shape[-2] == 1 and not traced()
        products_of = self._products_of_one_query if single else self._products
        products = products_of(pairs.hidden_states, pairs.key_features, pairs.keys)
        sums = nn.functional.logsigmoid(products).masked_fill(pairs.uncounted, 0.0).cumsum(dim=-1)
        return self._slopes.on(sums.device) * (sums[..., -1:] - sums)

    def _products(self, hidden_states: Tensor, key_features: Tensor, keys: Positions) -> Tensor:
        """`p_i . R_l n_l / width` of all pairs."""

        def turns() -> RotationFactors:
            angles = keys.ids[:, None, :, None].float().expand(-1, -1, -1, self.num_features // 2)
            return factors_of_angles(angles, _LAYOUT, torch.float32)

        factors = keys.remembered(f"turns of {self.num_features} by position", turns, keys.ids)
        key = apply_rotation(key_features, factors, _LAYOUT)
        return self._projected(hidden_states) @ key.transpose(-1, -2) / self.num_features

    def _products_of_one_query(self, hidden_states: Tensor, key_features: Tensor, keys: Positions) -> Tensor:
        """The same: all pairs of a key turn by one angle, so the product is a sum of products with the unturned key.

        They are those of the query, times the cosine, and of the query after a quarter turn, times the sine.
        """

        def waves() -> Tensor:
            angles = keys.ids[:, None, None].float()
            return torch.cat((angles.cos(), angles.sin()), dim=2)

        def both() -> Tensor:
            first, second = (self.projection.float() / self.num_features).chunk(2, dim=1)
            return torch.stack((torch.cat((first, second), 1), torch.cat((-second, first), 1)), dim=1).flatten(0, 2)

        query = nn.functional.linear(hidden_states.float(), keys.kept(self, "both", both))
        query = query.view(len(query), -1, 2, self.num_features)
        products = query @ key_features.transpose(-1, -2)
        return (products * keys.remembered("waves", waves, keys.ids)).sum(-2, keepdim=True)

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
