"""Low-rank relative logits, as in Inkling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.bias.relative_tables import check_whole_distances, select_rows
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.limits import LARGEST_WIDTH, MOST_DISTANCES
from hf_posenc.schemes.parts import PairwiseBias, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_integer


class LowRankRelativeBias(PairwiseBias):
    """Every query token mixes a few learned profiles of bias over distance.

    Args:
        num_heads: number of query heads.
        hidden_size: width of what the layer projects its queries and keys from.
        rank: number of profiles, at most the width of the hidden states: more could be expressed by fewer.
        window: length of a profile.
        initializer_range: standard deviation of new entries.
    """

    reads_later_keys = False
    whole_positions = True

    def __init__(self, num_heads: int, hidden_size: int, rank: int, window: int, initializer_range: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.initializer_range = initializer_range
        self.projection = nn.Parameter(torch.empty(num_heads * rank, hidden_size))
        self.profiles = nn.Parameter(torch.empty(rank, window))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every entry from N(0, initializer_range)."""
        nn.init.normal_(self.projection, std=self.initializer_range)
        nn.init.normal_(self.profiles, std=self.initializer_range)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: without hidden states, or for real positions.
        """
        if pairs.hidden_states is None:
            raise ValueError(
                "low_rank_relative mixes its profiles by the hidden states that queries are projected from, but this "
                "layer gives none. Use a scheme that reads queries, such as 'shaw'."
            )
        steps_back = -pairs.distance
        check_whole_distances(steps_back, "low_rank_relative", "Use a map to whole positions.")
        mixture = nn.functional.linear(pairs.hidden_states.float(), self.projection.float())
        mixture = mixture.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        window = self.profiles.shape[-1]
        bias = select_rows(mixture @ self.profiles.float(), steps_back.clamp(0, window - 1))
        outside = (steps_back < 0) | (steps_back >= window)
        return bias.masked_fill(outside.unsqueeze(1), 0.0)


@register_scheme
@dataclass(frozen=True)
class LowRankRelativeConfig(SchemeConfig):
    """A bias per distance that every token mixes from a few profiles (the relative logits of Inkling in transformers).

    For position i of the query with hidden state `x_i`, position j of the key and head h::

        r(i, h)    = W_h x_i                          rank numbers
        bias(i, j) = r(i, h) . P[:, i - j]            for 0 <= i - j < window, else 0

    `W` (`projection`) is `(heads * rank, hidden)` and `P` (`profiles`) is `(rank, window)`, shared by the heads; both
    are learned per layer. There is no paper: the formula is that of `InklingRelativeLogits`. Inkling multiplies queries
    and keys by `1 / head_dim` after normalising them; the bias is added as it is. Its layers with a sliding window take
    that window; its logarithmic temperature is another mechanism. Causal models only.

    Args:
        rank: number of profiles, at most the width of the hidden states: more could be expressed by fewer.
        window: in tokens, how far back the bias reaches, at most 2**16.
    """

    name: ClassVar[str] = "low_rank_relative"
    per_layer: ClassVar[bool] = True

    rank: int = 16
    window: int = 1024

    def __post_init__(self) -> None:
        check_integer(self, "rank", minimum=1, maximum=LARGEST_WIDTH)
        check_integer(self, "window", minimum=1, maximum=MOST_DISTANCES)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            UnsupportedError: in a bidirectional model.
            ValueError: for more profiles than the hidden states have components.
        """
        if not context.causal:
            raise UnsupportedError(
                "low_rank_relative has profiles for earlier keys only and would leave the later ones of this "
                "bidirectional model without positions. Use 'shaw' or 'transformer_xl'."
            )
        input_size = context.layer_input_size or context.hidden_size
        if self.rank > input_size:
            raise ValueError(
                f"LowRankRelativeConfig.rank is {self.rank}, but profiles are mixed by hidden states of {input_size} "
                f"components, so that no more than {input_size} profiles can differ. Use rank={input_size} or less."
            )
        return SchemeParts(
            logit_bias=LowRankRelativeBias(
                context.num_heads, input_size, self.rank, self.window, context.initializer_range
            )
        )
