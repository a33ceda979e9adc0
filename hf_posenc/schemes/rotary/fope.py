"""Fourier position embedding (FoPE)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.constants import DeviceConstant
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.rotary.hope import check_floor_options, floored_inverse_frequencies
from hf_posenc.schemes.rotary.rope import RotaryMap, check_rotary_options, key_heads, resolve_rotary_dim
from hf_posenc.schemes.validation import check_boolean, check_integer, check_number

#: Shares that add up to less are refused: dividing by the sum would make a pair many times longer.
SMALLEST_SUM = 0.1


def fourier_coefficients(num_key_heads: int, num_pairs: int, gain: float, seed: int) -> Tensor:
    """`(2, key_value_heads, num_pairs, num_pairs)` float32: for cosine and sine, what each pair has of each frequency.

    Drawn with Python's generator, whose `random()` gives the same numbers on every machine and in every version: they
    are not saved, only the seed is.
    """
    generator = random.Random(seed)
    deviation = gain * math.sqrt(2 / (num_pairs * (num_pairs + num_key_heads)))

    def normal() -> float:
        radius = math.sqrt(-2 * math.log(1 - generator.random()))
        return deviation * radius * math.cos(2 * math.pi * generator.random())

    shape = (2, num_key_heads, num_pairs, num_pairs)
    drawn = [normal() for _ in range(math.prod(shape))]
    return torch.tensor(drawn, dtype=torch.float32, device="cpu").view(shape)


def share_sums(coefficients: Tensor) -> Tensor:
    """`(2, heads, n, m)` -> `(2, heads, 1, m)`: what the shares of each pair add up to, its own included."""
    return 1 + coefficients.sum(dim=-2, keepdim=True)


def normalized_shares(coefficients: Tensor) -> Tensor:
    """`(2, heads, n, m)` of the same shape: the shares of each pair, its own included, with the sum 1."""
    own = torch.eye(coefficients.shape[-1], device=coefficients.device)
    return (own + coefficients) / share_sums(coefficients)


class FourierMap(RotaryMap):
    """A `RotaryMap` in which the cosine and sine of every turning pair are mixed with those of the others.

    Args:
        inverse_frequencies: `(rotary_dim / 2,)` float32, the turning pairs first.
        layout: as in `RotaryMap`.
        coefficients: `(2, key_value_heads, turning, turning)` float32; the pairs' own cosine and sine come on top, and
            the shares of a pair are divided by their sum.
        learnable: whether the coefficients are trained.
    """

    whole_heads = True

    def __init__(self, inverse_frequencies: Tensor, layout: str, coefficients: Tensor, learnable: bool) -> None:
        super().__init__(inverse_frequencies, layout)
        self.num_turning = coefficients.shape[-1]
        self._initial_coefficients = DeviceConstant(coefficients)
        self.coefficients: nn.Parameter | None = None
        if learnable:
            self.coefficients = nn.Parameter(torch.empty(coefficients.shape))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets learned coefficients back to those of the seed."""
        if self.coefficients is not None:
            self.coefficients.copy_(self._initial_coefficients.on(self.coefficients.device))

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns mixed cosine and sine, each `(batch or 1, query_len, key_value_heads, rotary_dim)` in float32."""
        if self.coefficients is not None:
            coefficients = self.coefficients.float()
        else:
            coefficients = self._initial_coefficients.on(positions.ids.device)
        angles = self.angles(positions)
        turning, stopped = angles.split((self.num_turning, angles.shape[-1] - self.num_turning), dim=-1)
        mixed = []
        for function, mix in zip((torch.cos, torch.sin), normalized_shares(coefficients), strict=True):
            values = _full_precision_product(function(turning), mix)
            rest = function(stopped).unsqueeze(-2).expand(*values.shape[:-1], -1)
            mixed.append(self.for_both_of_pair(torch.cat((values, rest), dim=-1)))
        return tuple(mixed)


def _full_precision_product(own: Tensor, mix: Tensor) -> Tensor:
    """`(batch or 1, length, n)` and `(heads, n, m)` -> `(batch or 1, length, heads, m)`, float32 under autocast too."""
    if not torch.amp.is_autocast_available(own.device.type):
        return torch.einsum("bln,hnm->blhm", own, mix)
    with torch.autocast(own.device.type, enabled=False):
        return torch.einsum("bln,hnm->blhm", own, mix)


@register_scheme
@dataclass(frozen=True)
class FopeConfig(SchemeConfig):
    """Pairs that turn with a Fourier series instead of one frequency (FoPE, arXiv:2412.17739, section 4, appendix B).

    Pairs too slow to complete a turn in training stand still, as in `hope`. Every other pair `m` of key head `h` has
    the place of its cosine and sine taken by::

        cosine[h, m](p) = (cos(w[m] * p) + sum over n of a[h, n, m] * cos(w[n] * p)) / (1 + sum over n of a[h, n, m])
        sine[h, m](p)   = (sin(w[m] * p) + sum over n of b[h, n, m] * sin(w[n] * p)) / (1 + sum over n of b[h, n, m])

    over the pairs `n` that turn, with `w[m] = theta ** (-2 m / rotary_dim)` and fixed random `a` and `b`. A mixed pair
    is no rotation: it changes norms, and logits depend a little on position beside distance. At position 0 nothing is
    changed.

    Followed is the listing of the paper's appendix B. Its division by the sum of all shares is missing in the paper's
    equations 11 to 13; the released code has it as an option (`fourier_norm`), which its published settings leave off.
    From the listing is the draw, too: normal, with the deviation `gain * sqrt(2 / (K * (K + heads)))` for `K` turning
    pairs, a Xavier initialisation of a tensor with an axis of heads; the code has gains of 0.3, 0.4 and 0.6 for models
    of 60M, 180M and 1.2B parameters. Unlike in the listing, stopped pairs stay as they are (there they have a sine of 1
    beside the cosine of 1, a constant turn by 45 degrees and a gain of 2 in the logit), all turning pairs are mixed
    (there at most half of the head's pairs), they turn as in RoPE (there the other way, which no logit shows), and the
    heads are the key heads, whose mix the query heads that read them share, so that a query and a key at one position
    agree. The paper also tries more frequencies than those of the pairs (`D`, its best for passkeys is 64); here they
    are the frequencies of the turning pairs, as in the listing.

    Numbers are drawn from `seed` alone and not saved. All layers have the same ones; for different ones schedule one
    `fope` per layer with its own seed.

    Args:
        theta: the base, at least 1.
        training_length: as in `HopeConfig`.
        gain: how strongly frequencies are mixed; 0 is `hope`. Refused where it leaves a pair shares that nearly cancel.
        seed: of the random coefficients.
        learnable: trains the coefficients, in every layer its own, from the same start; the paper keeps them fixed.
        rotary_dim: the width over which the frequencies spread; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "fope"

    theta: float = 10000.0
    training_length: int | None = None
    gain: float = 0.3
    seed: int = 0
    learnable: bool = False
    rotary_dim: int | None = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        check_rotary_options(self)
        check_floor_options(self)
        check_number(self, "gain", minimum=0, maximum=100)
        check_integer(self, "seed", minimum=0, maximum=2**63 - 1)
        check_boolean(self, "learnable")

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether every layer owns its coefficients."""
        return self.learnable

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a query-key map.

        Raises:
            ValueError: if there is no usable length, the rotary width is odd or does not fit the head, or the drawn
                shares of a pair add up to less than `SMALLEST_SUM`.
        """
        rotary_dim = resolve_rotary_dim(self, self.rotary_dim, context)
        frequencies = floored_inverse_frequencies(self, rotary_dim, context)
        turning = sum(frequency > 0 for frequency in frequencies.tolist())
        coefficients = fourier_coefficients(key_heads(context), turning, self.gain, self.seed)
        smallest = float(share_sums(coefficients).min())
        if smallest < SMALLEST_SUM:
            raise ValueError(
                f"FopeConfig.gain is {self.gain}, with which seed {self.seed} draws shares of a pair that add up to "
                f"{smallest:.3g}. They are divided by that sum, which has to be at least {SMALLEST_SUM}. Give a "
                "smaller gain or another seed."
            )
        return SchemeParts(query_key_map=FourierMap(frequencies, self.layout, coefficients, self.learnable))
