"""RoPE without its lowest frequencies (p-RoPE)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.rotary.rope import RotaryConfig
from hf_posenc.schemes.rotary.scaling import rope_exponents
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme


def p_rope_inverse_frequencies(theta: float, rotary_dim: int, fraction: float) -> Tensor:
    """RoPE's frequencies of the first `floor(fraction * rotary_dim / 2)` pairs, then 0: `(rotary_dim / 2,)` float32."""
    # Only the kept powers are computed. The last bit of vectorised `pow` may depend on the number of elements, and
    # transformers' "proportional" type uses this number.
    kept = rope_exponents(rotary_dim)[: int(fraction * rotary_dim // 2)]
    stopped = rotary_dim // 2 - kept.shape[0]
    return torch.nn.functional.pad(1.0 / (theta**kept), (0, stopped))


@register_scheme
class PRopeConfig(RotaryConfig):
    """RoPE that keeps a fraction of its frequencies and stops the lowest ones (p-RoPE, arXiv:2410.06205, section 6).

    Pair m of a head is rotated, per position, by::

        theta ** (-2m / rotary_dim)   for m < floor(fraction * rotary_dim / 2), and not at all beyond

    The kept frequencies are those of the full width, unlike partial RoPE, which spreads all frequencies over fewer
    dimensions. Called "proportional" in transformers. `fraction=1` is RoPE, `fraction=0` no position encoding.

    Args:
        theta: the base.
        fraction: the kept share of the pairs, highest frequencies first.
        rotary_dim: the width over which the frequencies spread; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "p_rope"

    theta: float = 10000.0
    fraction: float = option(0.75, minimum=0, maximum=1)
    rotary_dim: int | None = None
    layout: str = "auto"

    def frequencies(self, context: BuildContext) -> Tensor:
        """RoPE's frequencies and zeros; raises as in `RotaryConfig`."""
        return p_rope_inverse_frequencies(self.theta, self._rotary_dim(context), self.fraction)
