"""RoPE without the frequencies that do not complete a turn in training (HoPE)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.rotary.rope import RotaryMap, check_rotary_options, resolve_rotary_dim
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies
from hf_posenc.schemes.validation import LARGEST_BASE, check_integer, check_number

#: The shortest length in which the fastest pair (one radian per position) completes a turn.
SHORTEST_LENGTH = math.ceil(2 * math.pi)


def check_floor_options(config: Any) -> None:
    """Checks `training_length`, and that `theta` orders the pairs from fast to slow.

    Raises:
        ValueError: for a value out of range.
    """
    check_number(config, "theta", minimum=1, maximum=LARGEST_BASE)
    check_integer(config, "training_length", minimum=SHORTEST_LENGTH, optional=True)


def floored_inverse_frequencies(config: Any, rotary_dim: int, context: BuildContext) -> Tensor:
    """Returns RoPE's frequencies, `(rotary_dim / 2,)` float32, with zeros for pairs that complete no turn in training.

    Args:
        config: config with `theta` and `training_length`; `None` takes the model's own length.
        rotary_dim: the rotary width.
        context: the place in the model.

    Raises:
        ValueError: if neither the config nor the model specifies a length, or the model's length is too short.
    """
    name = type(config).__name__
    length = config.training_length or context.max_positions
    if length is None:
        raise ValueError(
            f"{name}.training_length is None and the model's config has no length. Give training_length=, the number "
            "of tokens of a training sequence."
        )
    if length < SHORTEST_LENGTH:
        raise ValueError(
            f"{name}.training_length is None and the model's length is {length}, in which no pair completes a turn, "
            f"so nothing would be rotated. Give training_length= of at least {SHORTEST_LENGTH}, or use 'none'."
        )
    frequencies = rope_inverse_frequencies(config.theta, rotary_dim)
    return frequencies.masked_fill(frequencies < 2 * math.pi / length, 0.0)


@register_scheme
@dataclass(frozen=True)
class HopeConfig(SchemeConfig):
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
    training_length: int | None = None
    rotary_dim: int | None = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        check_rotary_options(self)
        check_floor_options(self)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a query-key map.

        Raises:
            ValueError: if there is no usable length, or the rotary width is odd or does not fit the head.
        """
        rotary_dim = resolve_rotary_dim(self, self.rotary_dim, context)
        return SchemeParts(query_key_map=RotaryMap(floored_inverse_frequencies(self, rotary_dim, context), self.layout))
