"""The axes of rotary modules that read positions on several axes (M-RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.rotary_functions import call_rotary, has_layer_types, inverse_frequencies_of
from hf_posenc.patching.find.rotary_spectra import scratch_copy

AXES = 3


def frequencies_by_axis(rotary: nn.Module, layer_type: str | None, layout: str) -> Tensor | None:
    """The frequencies of every axis of a rotary module, found by moving one token along one axis at a time.

    Args:
        rotary: the module, which is not changed.
        layer_type: the layer type, if the module has separate frequencies for several.
        layout: the pairing of the rotary function that uses the phases.

    Returns:
        `(3, pairs)` float32 in radians per position, or `None` if the module reads positions on one axis.

    Raises:
        UnsupportedError: if it reads another number of axes, or the two dimensions of a pair turn with different axes.
    """
    axes = number_of_axes(rotary, layer_type)
    if axes == 1:
        return None
    own = inverse_frequencies_of(rotary, layer_type)
    clone, pairs = scratch_copy(rotary), own.shape[-1]
    hidden = torch.zeros(1, 1, 1, device=own.device)
    rows = []
    for axis in range(axes):
        position_ids = torch.zeros(axes, 1, 1, dtype=torch.int64, device=own.device)
        position_ids[axis] = 1
        cos, sin = call_rotary(clone, hidden, position_ids, *((layer_type,) if has_layer_types(clone) else ()))
        angles = torch.atan2(sin.float(), cos.float()).reshape(-1)
        whole = angles.shape[0] == 2 * pairs
        first, second = (angles[::2], angles[1::2]) if layout == "interleaved" else (angles[:pairs], angles[pairs:])
        rows.append(first if whole else angles)
        if axes != AXES or (whole and not torch.equal(first, second)):
            raise UnsupportedError(
                f"{type(rotary).__name__} rotates with positions on {axes} axes, in a way that no scheme of this "
                "library describes: 'mrope' has three axes, and one axis for both dimensions of a pair. Any scheme can "
                "replace it, and unpatch_model restores it."
            )
    return torch.stack(rows).cpu()


def number_of_axes(rotary: Any, layer_type: str | None) -> int:
    """The number of axes of the positions that a rotary module reads; 1 for ordinary RoPE."""
    sections = getattr(rotary, "mrope_section", None)
    if isinstance(sections, dict):
        sections = sections.get(layer_type) if layer_type in sections else next(iter(sections.values()), None)
    return 1 if sections is None else len(sections)


def reads_axes(rotary: Any) -> bool:
    """Whether a rotary module reads positions on several axes."""
    return number_of_axes(rotary, None) > 1
