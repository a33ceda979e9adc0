"""The binary digits of the position."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.parts import AdditiveEncoding, Positions, Reach
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import check_strength, option, whole_positions

_DEFAULT_MAX_POSITIONS = 2048
_MOST_BITS = 62


class BinaryEncoding(AdditiveEncoding):
    """Component `c` is bit `floor(c * bits / hidden)` of the position, least significant bit first."""

    whole_positions = True

    def __init__(self, config: BinaryConfig, context: BuildContext) -> None:
        super().__init__()
        max_positions = context.max_positions or _DEFAULT_MAX_POSITIONS
        bits = config.bits if config.bits is not None else max((max_positions - 1).bit_length(), 1)
        if bits > _MOST_BITS:
            raise ValueError(
                f"BinaryConfig.bits is None and the model's config has positions of {bits} bits; the limit is "
                f"{_MOST_BITS}. Give bits=."
            )
        if bits > context.hidden_size:
            raise ValueError(
                f"BinaryConfig needs {bits} components for {bits} bits, but the hidden size is {context.hidden_size}: "
                f"positions would collide. Use bits={context.hidden_size} or fewer."
            )
        self.hidden_size = context.hidden_size
        self.bits = bits
        self.scale = config.scale
        self.length_reach = Reach(
            2**bits, f"that {bits} bits can tell apart. Patch with 'binary' and bits={bits + 1} or more."
        )

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in float32; padding gets zeros.

        Raises:
            SequenceLengthError: for a position of `2**bits` or more, which would repeat an earlier vector.
            ValueError: for positions that are not integers.
        """
        whole_positions(positions.ids, "binary")
        self.length_reach.check(positions)
        digit = torch.arange(self.hidden_size, device=positions.ids.device) * self.bits // self.hidden_size
        ids = positions.ids.clamp(min=0).unsqueeze(-1)
        # Not a shift, which ONNX exporters do not translate.
        return (ids // 2**digit % 2).float() * self.scale


@register_scheme
class BinaryConfig(SchemeConfig):
    """Adds the binary digits of the position (Hugging Face blog "You could have designed SOTA position encoding").

    To component `c` of a token at position p, with n bits, it adds::

        PE(p)_c = scale * (bit floor(c * n / hidden) of p)

    The digits are stretched over the hidden size, least significant first, and bounded; neighbouring positions may
    differ in one digit or in all of them.

    Args:
        bits: number of digits; `None` takes the smallest number that covers the model's own length (2048 if it has
            none).
        scale: the value of a set bit, not 0.
    """

    name: ClassVar[str] = "binary"
    part_class = BinaryEncoding

    bits: int | None = option(None, minimum=1, maximum=_MOST_BITS)
    scale: float = option(1.0, check_strength)
