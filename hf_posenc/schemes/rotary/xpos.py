"""Extrapolatable position embedding (xPos)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.parts import DeviceConstant, Reach
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.rope import RotaryConfig, RotaryMap
from hf_posenc.schemes.rotary.scaling import rope_exponents
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_LENGTH, SMALLEST_FACTOR
from hf_posenc.schemes.weights import require

#: Largest natural logarithm of a magnitude: float32 overflows at 88.7, and the product with the heads needs a margin.
MAX_LOG_MAGNITUDE = 80.0
#: Its value in float16, which ends at 65504, so that a pair of queries or keys may have a length of up to 256.
MAX_LOG_MAGNITUDE_FLOAT16 = 5.5


class XposMap(RotaryMap):
    """A rotation that also scales queries down and keys up with their position."""

    symmetric = False

    def __init__(self, config: XposConfig, context: BuildContext) -> None:
        super().__init__(config.frequencies(context), config.layout)
        self.origin = config.origin
        self.length_reach = Reach(
            math.floor(config.origin + config.reach),
            f"whose xPos magnitudes fit float32 around the origin {config.origin}. Give a larger scale_base or gamma, "
            "or move the origin.",
        )
        zeta = (rope_exponents(self.rotary_dim) + config.gamma) / (1 + config.gamma)
        self._decay = DeviceConstant(self.for_both_of_pair(zeta.log() / config.scale_base))

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns cosine and sine of queries, then of keys, each `(batch or 1, query_len, rotary_dim)` in float32.

        Raises:
            SequenceLengthError: for positions whose magnitude does not fit float32.
        """
        self.length_reach.check(positions)
        cosine, sine = super().phases(positions)
        steps = positions.ids.unsqueeze(-1).float()
        magnitude = ((steps - self.origin if self.origin else steps) * self._decay.on(steps.device)).exp()
        return cosine * magnitude, sine * magnitude, cosine / magnitude, sine / magnitude

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """As in `RotaryMap`. Raises SequenceLengthError for positions whose magnitude does not fit `dtype`."""
        self._check_fit(phases[:2], dtype)
        self._check_fit(phases[2:], dtype)
        return super().prepared(phases, dtype)

    def _check_fit(self, phases: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        if dtype != torch.float16 or torch.jit.is_tracing() or phases[0].is_meta or not phases[0].numel():
            return
        share = MAX_LOG_MAGNITUDE_FLOAT16 / MAX_LOG_MAGNITUDE
        limit = math.floor(self.origin + share * ((self.length_reach.length or 0) - self.origin))
        require(
            torch.hypot(*phases).max() <= math.exp(MAX_LOG_MAGNITUDE_FLOAT16),
            f"A token of this call is too far from xPos's origin {self.origin} for float16: magnitudes of queries "
            f"and keys fit it up to position {limit}. Use bfloat16 or float32, give a larger scale_base or gamma, "
            "or move the origin.",
        )


@register_scheme
class XposConfig(RotaryConfig):
    """RoPE with logits that also decay with distance, each pair at its own rate (xPos, arXiv:2212.10554, section 2).

    Pair `m` of a query at position `p` and of a key at position `s` become::

        zeta[m]  = (2 m / rotary_dim + gamma) / (1 + gamma)
        query[m] = zeta[m] ** ( (p - origin) / scale_base) * rotate(query[m], p * theta ** (-2 m / rotary_dim))
        key[m]   = zeta[m] ** (-(s - origin) / scale_base) * rotate(key[m],   s * theta ** (-2 m / rotary_dim))

    so that the contribution of a pair is `zeta[m] ** ((p - s) / scale_base)` times its contribution in RoPE: slow pairs
    decay less. The origin cancels in every logit. It only determines where the magnitudes of queries and keys are close
    to one.

    The authors' code uses the middle of the current sequence as origin, which changes all cached keys with every new
    token. Here the origin is fixed, so that keys can be cached; the logits are the same. Queries shrink and keys grow
    with the distance from the origin, by the factor `((1 + gamma) / gamma) ** (1 / scale_base)` per position in the
    fastest pair. With the defaults, the range of float32 and bfloat16 is sufficient for about 32 000 positions on
    either side; longer sequences are refused. The range of float16 is sufficient for about 2 200 positions on either
    side (a pair of a query or key may then have a length of up to 256); positions further away are refused in this
    dtype. In that case give a larger `scale_base`, or an origin in the middle. The paper's
    blockwise attention is a separate mask and not part of the scheme.

    Causal models only: for keys after the query, the factor would grow with distance without bound.

    Args:
        theta: the base of the frequencies.
        gamma: controls the decay of the fastest pair; a larger value means less decay.
        scale_base: the distance in tokens after which a pair has decayed by its `zeta`.
        origin: the position at which magnitudes are kept.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`. The authors' code pairs neighbours ("interleaved").
    """

    name: ClassVar[str] = "xpos"
    part_class = XposMap
    causal_only = (
        "XposConfig does not support a bidirectional model: its factor decays for past keys but grows "
        "without bound for later keys. Use 'rope', or compose it with a symmetric bias such as 'alibi'."
    )

    theta: float = 10000.0
    gamma: float = option(0.4, minimum=SMALLEST_FACTOR, maximum=LARGEST_LENGTH)
    scale_base: float = option(512.0, minimum=SMALLEST_FACTOR, maximum=LARGEST_LENGTH)
    origin: float = option(0.0, minimum=0, maximum=LARGEST_LENGTH)
    rotary_dim: int | None = None
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.origin > self.reach:
            raise ValueError(
                f"XposConfig.origin is {self.origin}; expected at most {math.floor(self.reach)}, because otherwise "
                "the magnitude of a query at position 0 does not fit float32. Give a smaller origin or a larger "
                "scale_base."
            )

    @property
    def reach(self) -> float:
        """The maximum distance from the origin, in positions, at which the fastest pair's magnitude fits float32."""
        return MAX_LOG_MAGNITUDE * self.scale_base / math.log1p(1 / self.gamma)
