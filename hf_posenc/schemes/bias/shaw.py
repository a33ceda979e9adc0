"""Shaw's relative position representations."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.bias.relative_tables import (
    check_whole_positions,
    clipped_rows,
    products_of_rows,
    sinusoidal_products,
    turn_frequencies,
)
from hf_posenc.schemes.bias.wavelet import WaveletConfig
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias, SchemeParts
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import MOST_DISTANCES
from hf_posenc.schemes.weights import NativeTable

#: The clipping distance of the paper's base model.
DEFAULT_MAX_DISTANCE = 16


class ShawBias(NativeTable, PairwiseBias):
    """The product of each query with a learned vector per clipped distance."""

    reads_later_keys = False
    reads_heads = True
    whole_positions = True

    def __init__(self, config: ShawConfig, context: BuildContext) -> None:
        super().__init__()
        self.whole_heads = config.per_head
        self.behind = DEFAULT_MAX_DISTANCE if config.max_distance is None else config.max_distance
        self.ahead = self.behind if config.max_distance_ahead is None else config.max_distance_ahead
        tables = (context.num_heads,) if config.per_head else ()
        shape = (*tables, self.behind + 1 + self.ahead, context.head_dim)
        self.weight = self.learned("weight", shape, std=context.initializer_range)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: for positions that are not integers.
        """
        check_whole_positions(
            pairs.keys, "The learned table of shaw", "Use integer positions, or ShawConfig(table='sinusoidal')."
        )
        rows, occurring = clipped_rows(pairs, -self.behind, self.ahead)
        return products_of_rows(self, pairs, self.weight, rows, occurring)


class SinusoidalShawBias(PairwiseBias):
    """The product of each query with the fixed sinusoid of the distance, without clipping.

    Args:
        head_dim: width of a query.
    """

    whole_heads = False
    reads_later_keys = False
    reads_heads = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self._frequencies = turn_frequencies(head_dim, 10000.0)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32."""
        return sinusoidal_products(pairs.query.float(), self._frequencies, pairs)


@register_scheme
class ShawConfig(SchemeConfig):
    """Multiplies every query with a vector per clipped distance (Shaw, arXiv:1803.02155, eq. 4, section 3.2).

    With `scaling` the layer's own factor (`head_dim ** -0.5` in the paper) and position i of the query, j of the key::

        bias(i, j) = scaling * q_i . a[clip(j - i, -max_distance, max_distance)]

    `a` is `(2 * max_distance + 1, head_dim)`, shared by the heads of a layer; every layer has its own.

    The paper also adds a vector per distance to the values (eq. 3). That term changes the outputs of attention but not
    its logits, and is omitted. In the paper's ablation (table 3) the key term alone is as good as both.

    Two fixed tables without clipping can replace the learned table: "sinusoidal" is `[sin(d w), cos(d w)]` of `d = j -
    i` with the frequencies `w_m = 10000 ** (-2 m / head_dim)`, and "wavelet" is `WaveletConfig()`.

    Args:
        table: "learned", "sinusoidal" or "wavelet".
        max_distance: the distance in tokens from which on keys share one vector, at most 2**16; `None` is 16, as in the
            paper's base model. Learned table only.
        max_distance_ahead: `max_distance` for later keys; `None` takes `max_distance`. Wav2Vec2-BERT has 64 behind and
            8 ahead. Learned table in bidirectional models only.
        per_head: whether every query head has its own learned table.
    """

    name: ClassVar[str] = "shaw"
    per_layer: ClassVar[bool] = True

    table: str = option("learned", choices=("learned", "sinusoidal", "wavelet"))
    max_distance: int | None = option(None, minimum=1, maximum=MOST_DISTANCES)
    max_distance_ahead: int | None = option(None, minimum=0, maximum=MOST_DISTANCES)
    per_head: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table != "learned":
            for option in ("max_distance", "max_distance_ahead", "per_head"):
                value = getattr(self, option)
                if value is not None and value is not False:
                    raise ValueError(
                        f"ShawConfig.{option} is {value!r}, which applies to a learned table, but ShawConfig.table is "
                        f"{self.table!r}, a fixed function of the distance. Omit {option}."
                    )

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            ValueError: if a fixed table does not fit the width of a head, or if `max_distance_ahead` is given in a
                causal model.
        """
        if self.table == "wavelet":
            return WaveletConfig().build(context)
        if self.table == "sinusoidal":
            if context.head_dim % 2:
                raise ValueError(
                    "ShawConfig.table is 'sinusoidal', which needs pairs of a sine and a cosine, but the heads have "
                    f"the odd width {context.head_dim}. Use table='learned'."
                )
            return SchemeParts(logit_bias=SinusoidalShawBias(context.head_dim))
        if context.causal and self.max_distance_ahead is not None:
            raise ValueError(
                f"ShawConfig.max_distance_ahead is {self.max_distance_ahead}, which applies to later keys, but this "
                "causal model does not attend to them. Omit it."
            )
        return SchemeParts(logit_bias=ShawBias(self, context))
