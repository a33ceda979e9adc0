"""RoPE whose imaginary part is the logit of further heads (RoPE++)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.parts import DeviceConstant
from hf_posenc.schemes.rotary.rope import RotaryConfig, RotaryMap
from hf_posenc.schemes.rotary.rotation_kernel import apply_rotation, rotation_factors
from hf_posenc.schemes.scheme import BuildContext, register_scheme


class RopePpMap(RotaryMap):
    """A rotation in which two neighbouring heads compute both parts of one complex product."""

    symmetric = False
    whole_heads = True
    heads_together = 2
    reads_magnitude = False

    def __init__(self, config: RopePpConfig, context: BuildContext) -> None:
        super().__init__(config.frequencies(context), config.layout)
        groups = context.num_heads // context.key_heads
        if context.num_heads % 2 or (groups % 2 and groups > 1):
            raise ValueError(
                f"rope_pp makes pairs of neighbouring heads that read the same keys, but this layer has "
                f"{context.num_heads} query heads and {context.key_heads} key heads. It needs an even number of query "
                "heads for each key head, or an even number of heads with a key head each. Use 'rope'."
            )
        self.shares_keys = groups == 1
        self.num_pairs = context.num_heads // 2
        self._first_of_pair = DeviceConstant(torch.arange(0, context.num_heads, 2, device="cpu").repeat_interleave(2))

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the factors of queries, for both heads of a pair, and of keys, in the dtype of the heads.

        The second head of a pair turns by 90 degrees less, so that its product with a key is the imaginary part.
        """
        cosine, sine = phases
        both = torch.stack((cosine, sine), dim=-2), torch.stack((sine, -cosine), dim=-2)
        of_pairs = rotation_factors(*both, self.layout, dtype).each(lambda factor: factor.unsqueeze(1))
        of_keys = rotation_factors(cosine, sine, self.layout, dtype)
        if cosine.shape[-2] != 1:
            return of_pairs, of_keys
        # A single token takes the fewest operators if every head has its own factors.
        of_heads = of_pairs.each(lambda factor: factor.expand(-1, self.num_pairs, -1, -1, -1).flatten(1, 2))
        if self.shares_keys:
            of_keys = of_keys.each(lambda factor: factor.expand(-1, 2 * self.num_pairs, -1, -1))
        return of_heads, of_keys

    def map_query(self, query: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """`(batch, heads, query_len, head_dim)`, same shape and dtype; every second head is replaced."""
        factors = self._factors(phases, query)[0]
        if factors.direct.ndim == query.ndim:
            return apply_rotation(self._repeated(query), factors, self.layout)
        pairs = query[:, ::2, None].expand(-1, -1, 2, -1, -1)
        return apply_rotation(pairs, factors, self.layout).flatten(1, 2)

    def map_key(self, key: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """`(batch, key_value_heads, query_len, head_dim)`, same shape and dtype."""
        if not self.shares_keys:
            return super().map_key(key, phases)
        if key.shape[-2] == 1:
            return super().map_key(self._repeated(key), phases)
        rotated = super().map_key(key[:, ::2], phases)
        return torch.stack((rotated, rotated), dim=2).flatten(1, 2)

    def _repeated(self, heads: Tensor) -> Tensor:
        """The first head of each pair, twice."""
        return heads.index_select(1, self._first_of_pair.on(heads.device))


@register_scheme
class RopePpConfig(RotaryConfig):
    """RoPE whose imaginary part is the logit of every second head (RoPE++, arXiv:2512.07525).

    With the pairs of a query at position `p` and of a key at position `s` as complex numbers `q[m]` and `k[m]`::

        z         = sum over m of q[m] * conj(k[m]) * exp(i * (p - s) * theta ** (-2 m / rotary_dim))
        head 2n   : logit = Re z        as in RoPE
        head 2n+1 : logit = Im z        RoPE of the query of head 2n rotated by -90 degrees

    Both heads of a pair have the query of the first one, and the rows of the query projection for the second one are
    unused. With an even number of query heads for each key head, this is RoPE++_EH: the paper's model halves queries,
    keys and values, so that it needs half as many key heads as RoPE does. To train one from scratch, build the model
    with half of its key heads. The paper's RoPE++_EC adds heads instead, so that the output projection has another
    shape; it is the same function in a model that was built with twice as many query heads.

    In a model with a key head for each query head, both heads of a pair also have the key of the first one, but
    separate values, which the paper does not have. If each of them kept its own query, the scheme would be RoPE with
    another initialization, because the projection can contain the rotation by -90 degrees.

    The paper trains causal models from scratch. A trained model changes half of its heads, so it has to be trained
    further. Dimensions that are not rotated are the same in both heads.

    Args:
        theta: the base of the frequencies.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "rope_pp"
    part_class = RopePpMap

    theta: float = 10000.0
    rotary_dim: int | None = None
    layout: str = "auto"
