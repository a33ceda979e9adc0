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
    """The cosines (or complex phases) among the phases of a rotary module whose first token is at position 0.

    Most modules return cosines before sines. GPT-J's returns sines first.
    """
    if isinstance(output, Tensor):
        return output
    first, second = output[:2]
    swapped = first.device.type != "meta" and not first[..., 0, :].any()
    found: Tensor = second if swapped else first
    return found


def angles_of(module: nn.Module, output: Any, length: int) -> tuple[Kind, Tensor]:
    """The kind of phases that a rotary module has returned for its first tokens, and the angles of all pairs.

    Args:
        module: the module, for the message of an error.
        output: what it returned for the positions 0 to `length - 1`.
        length: number of tokens.

    Returns:
        The kind, and `(length, pairs)` float64. On the meta device, where no values tell, phases count as full.

    Raises:
        UnsupportedError: if these are no phases of tokens in a row.
    """
    cosines = cosines_in(output)
    if cosines.is_complex():
        phases = cosines
    else:
        sines = output[1] if cosines is output[0] else output[0]
        phases = torch.complex(cosines.double(), sines.double())
    width = phases.shape[-1]
    if phases.numel() != length * width:
        raise unknown_seam(f"{type(module).__name__} returned phases {tuple(phases.shape)} for {length} tokens.")
    angles = phases.reshape(length, width).angle().double()
    if cosines.is_complex():
        return "complex", angles
    halves = angles.split(width // 2, dim=-1) if width > 1 else (angles, -angles)
    for one, other in ((halves[0], halves[1]), (angles[:, ::2], angles[:, 1::2])):
        if angles.device.type == "meta" or torch.equal(one, other):
            return "full", one
    return "half_width", angles


def frequencies_of_angles(module: nn.Module, angles: Tensor) -> Tensor:
    """The frequencies of the angles of consecutive positions, `(pairs,)` float32 in radians per position.

    Raises:
        UnsupportedError: if some angle is not the product of position and frequency.
    """
    ids = torch.arange(len(angles), device=angles.device).unsqueeze(-1)
    # The angle of the product, which is between -pi and pi.
    difference = torch.polar(torch.ones_like(angles), angles - ids * angles[1]).angle()
    if (difference.abs() > _ERROR + _ERROR_PER_POSITION * ids).any():
        raise unknown_seam(
            f"{type(module).__name__} stores no inverse frequencies, and its phases are not those of a rotation with "
            "fixed frequencies, in float32."
        )
    return angles[1].float()
