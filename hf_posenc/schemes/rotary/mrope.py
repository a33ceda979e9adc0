"""Multimodal rotary position embedding (M-RoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.rotary.rope import check_rotary_options, resolve_rotary_dim
from hf_posenc.schemes.rotary.rope_nd import CoordinateRotaryMap
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies
from hf_posenc.schemes.validation import check_boolean, check_integers

AXES = ("time", "height", "width")


@register_scheme
@dataclass(frozen=True)
class MRopeConfig(SchemeConfig):
    """RoPE with pairs for time, height and width (M-RoPE, Qwen2-VL, arXiv:2409.12191, section 2.1).

    A token at `(t, h, w)` turns pair `m` by::

        angle_m = P_a theta**(-2m / rotary_dim)        P = (t, h, w),  a the axis of pair m

    All pairs keep the frequency they have in RoPE. `sections` gives the number of pairs of each axis. The axes are
    either contiguous (time first, Qwen2-VL) or interleaved, `t h w t h w ...` until height and width have all their
    pairs, and the rest is time (Qwen3-VL). The model passes coordinates as `position_ids` of shape `(3, batch,
    length)`. For text, and if no coordinates are passed, `t = h = w = p`, which is exactly RoPE. The paper specifies
    neither sections nor a base. The defaults are those of the released models, scaled to the width of a head.

    Args:
        theta: the base; the released models have 1e6.
        sections: numbers of pairs of time, height and width, with the sum `rotary_dim / 2`. `None` is `(16, 24, 24)` of
            64, or `(24, 20, 20)` interleaved, in proportion.
        interleaved: whether the axes are interleaved instead of contiguous.
        rotary_dim: how many leading dimensions of a head are rotated, as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "mrope"

    theta: float = 1_000_000.0
    sections: tuple[int, ...] | None = None
    interleaved: bool = False
    rotary_dim: int | None = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        check_rotary_options(self)
        check_boolean(self, "interleaved")
        if self.sections is not None:
            check_integers(self, "sections", minimum=0, least=len(AXES), most=len(AXES))

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a query-key map.

        Raises:
            ValueError: if the rotary width is odd or does not fit the head, or the sections do not fit it.
        """
        rotary_dim = resolve_rotary_dim(self, self.rotary_dim, context)
        pairs = rotary_dim // 2
        sections = self.sections if self.sections is not None else default_sections(pairs, self.interleaved)
        if sum(sections) != pairs:
            raise ValueError(
                f"MRopeConfig.sections is {sections}, {sum(sections)} pairs, but {rotary_dim} rotated dimensions have "
                f"{pairs}. Use sections that sum to {pairs}, for example {default_sections(pairs, self.interleaved)}."
            )
        axis = torch.tensor(self._axis_of_pair(sections), device="cpu")
        owned = torch.nn.functional.one_hot(axis, len(AXES)).T.float()
        frequencies: Tensor = owned * rope_inverse_frequencies(self.theta, rotary_dim)
        return SchemeParts(query_key_map=CoordinateRotaryMap(frequencies, self.layout, self.name))

    def _axis_of_pair(self, sections: tuple[int, ...]) -> list[int]:
        if not self.interleaved:
            return [axis for axis, size in enumerate(sections) for _ in range(size)]
        turns = [pair % len(AXES) for pair in range(sum(sections))]
        axes = [axis if pair < len(AXES) * sections[axis] else 0 for pair, axis in enumerate(turns)]
        for axis in (1, 2):
            if axes.count(axis) != sections[axis]:
                raise ValueError(
                    f"MRopeConfig.sections is {sections}, but interleaved in {sum(sections)} pairs {AXES[axis]} gets "
                    f"{axes.count(axis)} of its {sections[axis]}. Give height and width a third of the pairs or less."
                )
        return axes


def default_sections(pairs: int, interleaved: bool) -> tuple[int, int, int]:
    """Scales the released models' sections, which are (16, 24, 24) of 64 pairs, or (24, 20, 20) interleaved."""
    if interleaved:
        side = 20 * pairs // 64
        return pairs - 2 * side, side, side
    time = pairs // 4
    height = (pairs - time + 1) // 2
    return time, height, pairs - time - height
