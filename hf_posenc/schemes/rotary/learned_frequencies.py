"""RoPE with learned frequencies."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from hf_posenc.schemes.rotary.rope import RotaryConfig, RotaryMap
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme


class LearnedFrequenciesMap(RotaryMap):
    """A rotation with trained frequencies. The parameters are logarithms of factors of the initial frequencies.

    Args:
        inverse_frequencies: `(rotary_dim / 2,)` float32, the initial frequencies.
        layout: as in `RotaryMap`.
        num_key_heads: number of key heads if every key head has its own frequencies; `None` for one set.
    """

    no_weight_decay = frozenset({"log_offsets"})

    def __init__(self, inverse_frequencies: Tensor, layout: str, num_key_heads: int | None = None) -> None:
        super().__init__(inverse_frequencies, layout)
        self.whole_heads = num_key_heads is not None
        heads = () if num_key_heads is None else (num_key_heads,)
        self.log_offsets = self.learned("log_offsets", (*heads, inverse_frequencies.shape[-1]), nn.init.zeros_)

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """`(rotary_dim / 2,)` or `(key_value_heads, rotary_dim / 2)` float32, for `lengths` `(batch or 1, 1)`."""
        return self._constants.on(lengths.device) * self.log_offsets.float().exp()


@register_scheme
class LearnedRopeConfig(RotaryConfig):
    """RoPE with learned frequencies, initialised with RoPE's own (LeRoPE, arXiv:2607.10134).

    Pair `m` turns by::

        exp(log_offset[m]) * theta ** (-2 m / rotary_dim)    radians per position

    with `log_offset` initially zero, so that the untrained scheme is RoPE. It is trained without weight decay. The
    paper has one vector `(rotary_dim / 2,)` for the whole model. A vector in every key head of every layer gives the
    learned frequencies of AdaRoPE (arXiv:2607.19363, without its temperature) and of multiplicative GRAPE
    (arXiv:2512.07805, without its learned planes); query heads use the vector of their key head.

    The implementation is based on the abstract of LeRoPE and secondary notes. The logarithmic parametrisation and the
    missing weight decay come from these sources. The separate gradient clipping is left to the training loop.

    Args:
        theta: the base of the initial frequencies.
        sharing: "model" has one vector for all layers and heads, "layer" one in every layer, "head" one in every key
            head of every layer.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "learned_rope"

    theta: float = 10000.0
    sharing: str = option("model", choices=("model", "layer", "head"))
    rotary_dim: int | None = None
    layout: str = "auto"

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether every layer has its own frequencies."""
        return self.sharing != "model"

    def rotation(self, context: BuildContext) -> LearnedFrequenciesMap:
        """The rotation; raises as `frequencies`."""
        heads = context.key_heads if self.sharing == "head" else None
        return LearnedFrequenciesMap(self.frequencies(context), self.layout, heads)
