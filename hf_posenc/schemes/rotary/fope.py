"""Fourier position embedding (FoPE)."""

from __future__ import annotations

import contextlib
import math
import random
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DeviceConstant
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.hope import SHORTEST_LENGTH, FlooredRotaryConfig
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme
from hf_posenc.schemes.weights import copied_

#: Smaller sums of shares are refused, because dividing by the sum would make a pair many times longer.
SMALLEST_SUM = 0.1


def fourier_coefficients(num_key_heads: int, num_turning: int, gain: float, seed: int, num_mixed: int) -> Tensor:
    """Draws each pair's share of each frequency, for cosine and sine: `(2, key_value_heads, num_turning, num_mixed)`
    float32.

    Python's generator is used because `random()` gives the same numbers on every machine and in every version: only
    the seed is saved, not the coefficients.
    """
    generator = random.Random(seed)
    deviation = gain * math.sqrt(2 / (num_mixed * (num_turning + num_key_heads)))

    def normal() -> float:
        radius = math.sqrt(-2 * math.log(1 - generator.random()))
        return deviation * radius * math.cos(2 * math.pi * generator.random())

    shape = (2, num_key_heads, num_turning, num_mixed)
    drawn = [normal() for _ in range(math.prod(shape))]
    return torch.tensor(drawn, dtype=torch.float32, device="cpu").view(shape)


def share_sums(coefficients: Tensor) -> Tensor:
    """Sums the shares of each pair, including its own: `(2, heads, n, m)` -> `(2, heads, 1, m)`."""
    return 1 + coefficients.sum(dim=-2, keepdim=True)


def released_shares(coefficients: Tensor) -> Tensor:
    """Sets the share of each mixed pair's own frequency to 1; shape `(2, heads, n, m)`.

    Of `n` frequencies, the `m` pairs use every `ceil(n / m)`-th one as their own. If the frequencies run out, the
    remaining pairs have none, as in the released code.
    """
    num_turning, num_mixed = coefficients.shape[-2:]
    identity = torch.zeros(num_turning, num_mixed, device=coefficients.device)
    step = math.ceil(num_turning / num_mixed)
    pairs = torch.arange(math.ceil(num_turning / step), device=coefficients.device)
    identity[pairs * step, pairs] = 1.0
    return identity + coefficients


class FourierMap(RotaryMap):
    """A `RotaryMap` in which the cosines and sines of rotating pairs are mixed with each other.

    Args:
        inverse_frequencies: `(rotary_dim / 2,)` float32, the rotating pairs first.
        layout: as in `RotaryMap`.
        coefficients: `(2, key_value_heads, turning, mixed)` float32, in addition to the pairs' own cosine and sine.
        learnable: whether the coefficients are trained.
        released: whether to follow the released code: shares are not normalised, and pairs that are not mixed have a
            cosine and a sine of 1. Otherwise the shares are divided by their sum, and pairs that are not mixed do not
            rotate.
    """

    whole_heads = True

    def __init__(
        self,
        inverse_frequencies: Tensor,
        layout: str,
        coefficients: Tensor,
        learnable: bool,
        released: bool = False,
    ) -> None:
        super().__init__(inverse_frequencies, layout)
        self.num_turning = coefficients.shape[-2]
        self.released = released
        self._initial_shares = DeviceConstant(self.shares(coefficients))
        #: Cosine and sine of the other pairs.
        self._others = DeviceConstant(torch.tensor((1.0, 1.0 if released else 0.0), device="cpu").view(2, 1, 1, 1, 1))
        self.coefficients: nn.Parameter | None = None
        if learnable:
            self.coefficients = self.learned("coefficients", coefficients.shape, copied_, values=coefficients)

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns mixed cosine and sine, each `(batch or 1, query_len, key_value_heads, rotary_dim)` in float32."""
        angles = self.angles(positions)
        turning, device = angles[..., : self.num_turning], angles.device
        learned = self.coefficients
        shares = self._initial_shares.on(device) if learned is None else self.shares(learned.float())
        waves, (_, heads, _, mixed) = torch.stack((turning.cos(), turning.sin())), shares.shape
        casts = torch._C._is_any_autocast_enabled() and device.type != "meta"
        # Float32 under autocast too.
        with torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext():
            values = waves.flatten(1, 2) @ shares.transpose(1, 2).flatten(2)
        values = values.view(*waves.shape[:3], heads, mixed)
        rest = self._others.on(device).expand(*values.shape[:-1], angles.shape[-1] - mixed)
        cosine, sine = self.for_both_of_pair(torch.cat((values, rest), dim=-1)).unbind(0)
        return cosine, sine

    def shares(self, coefficients: Tensor) -> Tensor:
        """The share of each frequency in each mixed pair, its own included; shape `(2, heads, n, m)`."""
        if self.released:
            return released_shares(coefficients)
        identity = torch.eye(coefficients.shape[-1], device=coefficients.device)
        return (identity + coefficients) / share_sums(coefficients)


@register_scheme
class FopeConfig(FlooredRotaryConfig):
    """Rotates each pair by a Fourier series instead of one frequency (FoPE, arXiv:2412.17739, section 4, appendix B).

    Pairs too slow to complete a turn in training do not rotate, as in `hope`. For every other pair `m` of key head `h`,
    cosine and sine are replaced by::

        cosine[h, m](p) = (cos(w[m] * p) + sum over n of a[h, n, m] * cos(w[n] * p)) / (1 + sum over n of a[h, n, m])
        sine[h, m](p)   = (sin(w[m] * p) + sum over n of b[h, n, m] * sin(w[n] * p)) / (1 + sum over n of b[h, n, m])

    over the rotating pairs `n`, with `w[m] = theta ** (-2 m / rotary_dim)` and fixed random `a` and `b`. The map of a
    mixed pair is not a rotation: it changes norms, and logits depend slightly on position as well as on distance.
    Position 0 is not changed.

    The paper and its code differ, and `variant` chooses between them:

    - "listing" follows the listing of appendix B, the formula above. Its division by the sum of all shares is missing
      in the paper's equations 11 to 13. There are two differences from the listing: all rotating pairs are mixed (the
      listing mixes at most half of the head's pairs), and pairs that do not rotate are not changed.
    - "released" follows the authors' published settings (`fourier_norm` off): shares are not normalised, at most half
      of the pairs are mixed, and all other pairs have a cosine and a sine of 1 at all positions, which is a constant
      rotation by 45 degrees and a factor of 2 in the logit. Position 0 is changed as well.

    Coefficients are normal with the deviation `gain * sqrt(2 / (mixed * (turning + heads)))`, a Xavier initialisation
    of a tensor with an axis of heads; the published settings have gains of 0.3, 0.4 and 0.6 for models of 60M, 180M and
    1.2B parameters. In both variants pairs rotate in the same direction as in RoPE (the authors' code rotates in the
    other direction, which gives the same logits). There is one set of coefficients per key head; query heads that share
    a key head share its coefficients, so that queries and keys at one position match. The paper also tries more
    frequencies than pairs (`D`; 64 is best for passkeys); here the frequencies are those of the rotating pairs.

    The coefficients depend only on `seed` and are not saved. All layers have the same coefficients; for different ones,
    use a schedule with one `fope` per layer, each with its own seed.

    Args:
        theta: the base, at least 1.
        training_length: as in `HopeConfig`.
        gain: how strongly frequencies are mixed; 0 is `hope`. Refused if the shares of a pair nearly cancel.
        seed: seed of the random coefficients.
        learnable: whether the coefficients are trained, separately in every layer, from the same initial values. They
            are fixed in the paper.
        variant: "listing" or "released", see above.
        rotary_dim: the width over which the frequencies spread; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "fope"

    theta: float = 10000.0
    training_length: int | None = option(None, minimum=SHORTEST_LENGTH)
    gain: float = option(0.3, minimum=0, maximum=100)
    seed: int = option(0, minimum=0, maximum=2**63 - 1)
    learnable: bool = option(False)
    rotary_dim: int | None = None
    layout: str = "auto"
    variant: str = option("listing", choices=("listing", "released"))

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether every layer has its own coefficients."""
        return self.learnable

    def rotation(self, context: BuildContext) -> FourierMap:
        """The map of queries and keys.

        Raises:
            ValueError: as `frequencies`, and if the drawn shares of a pair add up to less than `SMALLEST_SUM`.
        """
        frequencies = self.frequencies(context)
        rotary_dim = 2 * len(frequencies)
        turning = sum(frequency > 0 for frequency in frequencies.tolist())
        released = self.variant == "released"
        mixed = min(turning, rotary_dim // 4) if released else turning
        if mixed == 0:
            raise ValueError(
                f"FopeConfig.variant 'released' mixes a pair for every 4 rotated dimensions, and only {rotary_dim} are "
                "rotated. Rotate at least 4 dimensions, or use the variant 'listing'."
            )
        coefficients = fourier_coefficients(context.key_heads, turning, self.gain, self.seed, mixed)
        smallest = float(share_sums(coefficients).min())
        if smallest < SMALLEST_SUM and not released:
            raise ValueError(
                f"FopeConfig.gain is {self.gain}, with which seed {self.seed} draws shares of a pair that add up to "
                f"{smallest:.3g}. They are divided by that sum, which must be at least {SMALLEST_SUM}. Give a smaller "
                "gain or another seed."
            )
        return FourierMap(frequencies, self.layout, coefficients, self.learnable, released)
