"""Rotary modules that look their phases up in a table: what they rotate is read from the phases of the first tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.patching.find.seams import unknown_seam

Kind = Literal["full", "half_width", "complex"]
#: Allowed error of an angle, and of an angle per position: tables are computed in float32.
_ERROR, _ERROR_PER_POSITION = 1e-4, 2e-7


def cosines_in(output: Any) -> Tensor:
    """The cosines (or complex phases) among the phases of tokens from position 0 on. GPT-J returns sines first."""
    if isinstance(output, Tensor):
        return output
    first, second = output[:2]
    swapped = first.device.type != "meta" and not first[..., 0, :].any()
    found: Tensor = second if swapped else first
    return found


def angles_in(output: Any) -> tuple[Kind, Tensor]:
    """The kind of the phases of tokens from position 0 on, and the angles of all pairs, `(length, pairs)` float64.

    Phases are full if they contain each pair twice, and on the meta device, where no values show it.
    """
    cosines = cosines_in(output)
    if cosines.is_complex():
        return "complex", cosines[0].angle().double()
    sines = output[1] if cosines is output[0] else output[0]
    angles = torch.atan2(sines.double(), cosines.double())[0]
    pairs = angles.shape[-1] // 2
    for one, other in ((angles[:, :pairs], angles[:, pairs:]), (angles[:, ::2], angles[:, 1::2])):
        if angles.device.type == "meta" or torch.equal(one, other):
            return "full", one
    return "half_width", angles


def frequencies_of(module: nn.Module, angles: Tensor) -> Tensor:
    """The frequencies of the angles of consecutive positions, `(pairs,)` float32 in radians per position.

    Raises:
        UnsupportedError: if some angle is not the product of position and frequency.
    """
    ids = torch.arange(len(angles), device=angles.device).unsqueeze(-1)
    difference = torch.polar(torch.ones_like(angles), angles - ids * angles[1]).angle()
    if (difference.abs() > _ERROR + _ERROR_PER_POSITION * ids).any():
        raise unknown_seam(
            f"{type(module).__name__} stores no inverse frequencies, and its phases are not those of a rotation with "
            "fixed frequencies, in float32."
        )
    return angles[1].float()
