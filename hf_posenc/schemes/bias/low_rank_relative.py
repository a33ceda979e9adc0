"""Low-rank relative logits, as in Inkling."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.relative_tables import (
    check_whole_positions,
    clipped_rows,
    run_to_newest,
    selected_products,
)
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_WIDTH, MOST_DISTANCES


class LowRankRelativeBias(PairwiseBias):
    """A bias per distance: a mixture of a few learned profiles, with weights computed from the query token."""

    reads_later_keys = False
    whole_positions = True

    def __init__(self, config: LowRankRelativeConfig, context: BuildContext) -> None:
        super().__init__()
        input_size = context.input_size
        if config.rank > input_size:
            raise ValueError(
                f"LowRankRelativeConfig.rank is {config.rank}, but the hidden states that mix the profiles have "
                f"{input_size} components, so at most {input_size} profiles can be independent. Use rank={input_size} "
                "or less."
            )
        self.num_heads = context.num_heads
        self.projection = self.learned(
            "projection", (context.num_heads * config.rank, input_size), std=context.initializer_range
        )
        self.profiles = self.learned("profiles", (config.rank, config.window), std=context.initializer_range)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: if hidden states are missing, or positions are not integers.
        """
        if pairs.hidden_states is None:
            raise ValueError(
                "low_rank_relative mixes its profiles with the layer's hidden states, but this layer does not "
                "provide them. Use a scheme that reads queries, such as 'shaw'."
            )
        check_whole_positions(pairs.keys, "low_rank_relative", "Use integer positions.")
        mixture = nn.functional.linear(pairs.hidden_states.float(), self.projection.float())
        rank, window = self.profiles.shape
        run = run_to_newest(pairs, window - 1)
        if run is not None:
            profiles = pairs.keys.kept(self, "profiles from the farthest key on", lambda: self.profiles.float().flip(1))
            products = torch.mm(mixture.view(-1, rank), profiles.narrow(1, *run))
            return products.view(-1, self.num_heads, 1, run[1])
        mixture = torch.unflatten(mixture, -1, (self.num_heads, -1))
        # A zero on either side, for later keys and for those beyond the window.
        rows, (first, count) = clipped_rows(pairs, -1, window, back=True)
        profiles = pairs.keys.kept(self, "profiles", lambda: nn.functional.pad(self.profiles.float(), (1, 1)))
        profiles = profiles if count == window + 2 else profiles.narrow(1, first, count)
        return selected_products(mixture.transpose(1, 2), profiles, rows)


@register_scheme
class LowRankRelativeConfig(SchemeConfig):
    """A bias per distance, mixed from a few profiles for each token (the relative logits of Inkling in transformers).

    For position i of the query with hidden state `x_i`, position j of the key and head h::

        r(i, h)    = W_h x_i                          rank numbers
        bias(i, j) = r(i, h) . P[:, i - j]            for 0 <= i - j < window, else 0

    `W` (`projection`) is `(heads * rank, hidden)` and `P` (`profiles`) is `(rank, window)`, shared by the heads; both
    are learned per layer. There is no paper: the formula is that of `InklingRelativeLogits`. Inkling multiplies queries
    and keys by `1 / head_dim` after normalising them; the bias is added without a factor. Its sliding-window layers use
    that window. Its logarithmic temperature is a separate mechanism. Causal models only.

    Args:
        rank: number of profiles, at most the width of the hidden states; more would be redundant.
        window: number of tokens that the bias reaches back, at most 2**16.
    """

    name: ClassVar[str] = "low_rank_relative"
    per_layer: ClassVar[bool] = True
    part_class = LowRankRelativeBias
    causal_only = (
        "low_rank_relative has profiles for earlier keys only, but this model is bidirectional: its later "
        "keys would have no positions. Use 'shaw' or 'transformer_xl'."
    )

    rank: int = option(16, minimum=1, maximum=LARGEST_WIDTH)
    window: int = option(1024, minimum=1, maximum=MOST_DISTANCES)
