"""RoPE without the frequencies that do not complete a turn in training (HoPE)."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.rotary.rope import RotaryConfig
from hf_posenc.schemes.scheme import BuildContext, register_scheme
from hf_posenc.schemes.validation import LARGEST_BASE, check_number, option

#: The shortest length in which the fastest pair (one radian per position) completes a turn.
SHORTEST_LENGTH = math.ceil(2 * math.pi)


class FlooredRotaryConfig(RotaryConfig):
    """Base class of rotations that stop every pair too slow to complete a turn in training."""

    training_length: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "theta", minimum=1, maximum=LARGEST_BASE)

    def frequencies(self, context: BuildContext) -> Tensor:
        """Returns RoPE's frequencies, with zeros for pairs that complete no turn in training.

        Raises:
            ValueError: as in `RotaryConfig`, and if neither the config nor the model specifies a length, or the model's
                length is too short.
        """
        name = type(self).__name__
        length = self.training_length or context.max_positions
        if length is None:
            raise ValueError(
                f"{name}.training_length is None and the model's config has no length. Give training_length=, the "
                "number of tokens of a training sequence."
            )
        if length < SHORTEST_LENGTH:
            raise ValueError(
                f"{name}.training_length is None and the model's length is {length}, in which no pair completes a "
                f"turn, so nothing would be rotated. Give training_length= of at least {SHORTEST_LENGTH}, or use "
                "'none'."
            )
        frequencies = super().frequencies(context)
        return frequencies.masked_fill(frequencies < 2 * math.pi / length, 0.0)


@register_scheme
class HopeConfig(FlooredRotaryConfig):
    """RoPE that stops every pair too slow to complete a turn in training (HoPE, arXiv:2410.21216, section 5).

    Pair `m` turns by::

        w[m] = theta ** (-2 m / rotary_dim)    radians per position, and 0 where w[m] < 2 pi / training_length

    so that longer sequences have no angles that did not occur in training. This is p-RoPE with a fraction that depends
    on the length. Other schemes with this name (hyperbolic HoPE, arXiv:2509.05218; HoPE of vision-language models,
    arXiv:2505.20444) are different.

    Args:
        theta: the base, at least 1.
        training_length: number of tokens of a training sequence, at least 7; `None` takes the model's own length.
        rotary_dim: the width over which the frequencies spread; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "hope"

    theta: float = 10000.0
    training_length: int | None = option(None, minimum=SHORTEST_LENGTH)
    rotary_dim: int | None = None
    layout: str = "auto"
