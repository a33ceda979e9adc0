"""A soft end of the spectrum: the slowest pairs turn less, and the slowest not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.rotary.scaling.base import OuterScaling, RopeScaling, check_scaling
from hf_posenc.schemes.validation import option


@dataclass(frozen=True)
class ClippedScaling(OuterScaling):
    """Clipped RoPE (CoPE, arXiv:2602.05258): the slowest `n` pairs are slowed down along half a cosine, to a halt.

    The `k`-th of them (`k = 0 .. n - 1`, from the fastest) turns `(1 + cos(pi k / (n - 1))) / 2` times as fast as in
    RoPE or after another scaling: the first as before, the last not at all. Defined by the authors' code, which clips
    20 of the 64 pairs of Llama 3; the formulas of the paper were not available. Unlike the scalings with a factor, it
    states no length. The authors train the model further after clipping.

    Not to be confused with the scheme `cope`, contextual position encoding.

    Args:
        pairs: `n`, how many of the slowest pairs are clipped; all, if there are fewer.
        original_max_positions: instead of `pairs`, the length that the model was trained on, in tokens. Every pair that
            does not complete a turn of RoPE within it is clipped, which is how the authors explain the method.
        scaling: a scaling applied before clipping, such as YaRN.
    """

    type: ClassVar[str] = "clipped"

    pairs: int | None = option(None, minimum=2)
    original_max_positions: int | None = option(None, minimum=1)
    scaling: RopeScaling | None = option(None, check_scaling)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.pairs is None) == (self.original_max_positions is None):
            raise ValueError(
                f"ClippedScaling has pairs={self.pairs} and original_max_positions={self.original_max_positions}. Give "
                "one of them: how many of the slowest pairs are clipped, or the length that the model was trained on, "
                "for all that do not complete a turn within it."
            )

    def changed(self, frequencies: Tensor, theta: float) -> Tensor:
        """`(..., d/2)`."""
        total = frequencies.shape[-1]
        count = self.pairs
        if count is None:
            length = self.original_max_positions
            count = sum(2 * math.pi * theta ** (pair / total) > length for pair in range(total))
        count = min(count, total)
        if count < 2:
            raise ValueError(
                f"ClippedScaling changes nothing: {count} of the {total} pairs would be clipped, and the first of them "
                f"always turns as before. With theta={theta:g}, give pairs=2 or more, or a shorter "
                f"original_max_positions than {self.original_max_positions}."
            )
        angles = torch.linspace(0.0, math.pi, count, dtype=torch.float32, device=frequencies.device)
        taper = 0.5 * (1.0 + angles.cos())
        return frequencies * torch.cat((taper.new_ones(total - count), taper))
