"""Does a scheme place tokens on several axes (time, height, width), each by itself?"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.errors import PositionEncodingError
from hf_posenc.metrics.properties.measurement import Measurement, does_not_apply
from hf_posenc.metrics.properties.relativity import RELATIVE_UP_TO, logit_change
from hf_posenc.metrics.properties.specimen import Specimen, build_specimen, positions_at, random_contents
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig

SHIFTS = (1, 17, 500)
#: The rounding of logits is 1000 times smaller.
SEEN_ABOVE = 1e-3
_TOKENS = 48
#: Steps per axis: those of a picture of 896 pixels in patches of 14.
_STEPS = 64


@torch.no_grad()
def extensibility(scheme: str | SchemeConfig | Specimen, *, shifts: tuple[int, ...] = SHIFTS) -> Measurement:
    """Whether logits see every axis, and each only through distances along it.

    48 tokens are placed at random on a grid of 64 steps per axis. Passes if logits change where the coordinates of any
    one axis are drawn anew (by more than 1e-3), and do not where all of them move together along one axis (up to 2e-3),
    so that with all axes but one held fixed the scheme is a relative one of one dimension. The two axes of a
    hierarchical scheme are the segment and the place within it.

    Args:
        scheme: a name, a config, or a built specimen.
        shifts: steps along an axis.

    Returns:
        `value` is the largest change under a shift; `details` has it by axis, with the change where that axis is drawn
        anew, and `text`: the change from no coordinates at all to coordinates that all equal the position, 0 where
        one-dimensional text is a case of the scheme.
    """
    specimen = build_specimen(scheme)
    config = specimen.config
    segment_length = None
    if isinstance(config, HierarchicalConfig):
        if config.separators:
            return does_not_apply("segments end at separator tokens, so that positions alone do not say where")
        segment_length = config.segment_length
    axes = 2 if segment_length is not None else _number_of_axes(specimen)
    if axes is None:
        return does_not_apply("the scheme reads no coordinates")

    def logits(coordinates: Tensor) -> Tensor:
        if segment_length is None:
            return _logits(specimen, coordinates)
        segment, within = coordinates
        return specimen.logits(positions_at(segment * segment_length + within), random_contents(1, _TOKENS))

    # Tokens keep to the first quarter of their segments, so that a shift within them leads into no other.
    steps = _STEPS if segment_length is None else max(segment_length // 4, 1)
    grid, other = _grid(axes, 0, steps), _grid(axes, 1, steps)
    reference = logits(grid)
    seen, moved = [], []
    for axis in range(axes):
        redrawn = grid.clone()
        redrawn[axis] = other[axis]
        seen.append(logit_change(specimen, logits(redrawn), reference))
        allowed = [s for s in shifts if segment_length is None or axis == 0 or s + steps <= segment_length]
        changes = []
        for shift in allowed:
            shifted = grid.clone()
            shifted[axis] += shift
            changes.append(logit_change(specimen, logits(shifted), reference))
        moved.append(max(changes))
    text = None
    if segment_length is None:
        line = torch.arange(_TOKENS)
        text = logit_change(specimen, logits(line.expand(axes, -1)), _logits(specimen, None))
    details = {"axes": axes, "moved": moved, "seen": seen, "text": text}
    return Measurement(max(moved) <= RELATIVE_UP_TO and min(seen) > SEEN_ABOVE, max(moved), RELATIVE_UP_TO, details)


def _number_of_axes(specimen: Specimen) -> int | None:
    """How many axes the scheme reads: the first number it accepts whose coordinates change the logits."""
    for axes in (2, 3, 4):
        try:
            one, other = (_logits(specimen, _grid(axes, seed, _STEPS)) for seed in (0, 1))
        except (PositionEncodingError, ValueError):
            # A scheme of another number of axes says so; one of them is its own.
            continue
        if logit_change(specimen, other, one) > SEEN_ABOVE:
            return axes
    return None


def _grid(axes: int, seed: int, steps: int) -> Tensor:
    """`(axes, tokens)`."""
    return torch.randint(0, steps, (axes, _TOKENS), generator=torch.Generator().manual_seed(seed))


def _logits(specimen: Specimen, coordinates: Tensor | None) -> Tensor:
    return specimen.logits(positions_at(torch.arange(_TOKENS), coordinates), random_contents(1, _TOKENS))
