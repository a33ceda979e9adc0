"""Multimodal rotary position embedding (M-RoPE)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.grids import Places
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.rope import RotaryConfig
from hf_posenc.schemes.rotary.rope_nd import CoordinateRotaryMap
from hf_posenc.schemes.scheme import BuildContext, register_scheme
from hf_posenc.schemes.validation import LARGEST_FREQUENCY, option

AXES = ("time", "height", "width")


class MRopeMap(CoordinateRotaryMap):
    """A `CoordinateRotaryMap` on the diagonal for text, with or without the spatial reset of images.

    Args:
        frequencies: as in `CoordinateRotaryMap`.
        layout: as in `RotaryMap`.
        spatial_reset: whether height and width start at 0 in each image.
    """

    def __init__(self, frequencies: Tensor, layout: str, spatial_reset: bool) -> None:
        super().__init__(frequencies, layout, MRopeConfig.name)
        self.spatial_reset = spatial_reset

    def places(self, positions: Positions) -> Places:
        """Returns the caller's coordinates, or `t = h = w = p`."""
        where = super().places(positions)
        if not self.spatial_reset or positions.coordinates is None:
            return where
        return dataclasses.replace(where, coordinates=reset_images(where.coordinates, positions.ids >= 0))


def reset_images(coordinates: Tensor, real: Tensor) -> Tensor:
    """Counts the height and width of each image from 0.

    Args:
        coordinates: `(3, batch or 1, length)`, time, height and width.
        real: `(batch or 1, length)` bool, false for padding.

    Returns:
        The same with new heights and widths of images. A token belongs to an image if its coordinates differ, or those
        of a neighbour at the same time do: the first patch of an image has three equal coordinates, like text.
    """
    time = coordinates[0]
    differs = ((coordinates[1:] != time).any(0)) & real
    same_time = (time[:, 1:] == time[:, :-1]) & real[:, 1:] & real[:, :-1]
    edge = torch.zeros_like(differs[:, :1])
    after = torch.cat((same_time & differs[:, 1:], edge), dim=-1)
    before = torch.cat((edge, same_time & differs[:, :-1]), dim=-1)
    image = (differs | after | before) & real
    begins = image & ~torch.cat((edge, image[:, :-1]), dim=-1)
    slots = torch.arange(image.shape[-1], device=image.device)
    first = torch.where(begins, slots, 0).cummax(-1).values
    starts = coordinates[1:].gather(-1, first.expand_as(coordinates[1:]))
    return torch.cat((time.unsqueeze(0), torch.where(image, coordinates[1:] - starts, coordinates[1:])))


@register_scheme
class MRopeConfig(RotaryConfig):
    """RoPE with pairs for time, height and width (M-RoPE, Qwen2-VL, arXiv:2409.12191, section 2.1).

    A token at `(t, h, w)` turns pair `m` by::

        angle_m = P_a theta**(-2m / rotary_dim)        P = (t, h, w),  a the axis of pair m

    All pairs keep the frequency they have in RoPE. `sections` gives the number of pairs of each axis. The axes are
    either contiguous (time first, Qwen2-VL) or interleaved, `t h w t h w ...` until height and width have all their
    pairs, and the rest is time (Qwen3-VL). The model passes coordinates as `position_ids` of shape `(3, batch,
    length)`. For text, and if no coordinates are passed, `t = h = w = p`, which is exactly RoPE. The paper specifies
    neither sections nor a base. The defaults are those of the released models, scaled to the width of a head.

    With `by_head` (MHRoPE, arXiv:2510.23095), each axis has whole key heads instead of pairs, so that every axis has
    the full spectrum: in the heads of axis `a`, pair `m` turns by `P_a theta**(-2m / rotary_dim)`. Key heads past the
    sections are not rotated.

    With `spatial_reset` (the same paper), height and width start at 0 in each image, while time continues. If the first
    patch of an image is at `(o, o, o)`, its patches are read as::

        (t, h, w) -> (t, h - o, w - o)

    Text keeps its positions, also after the image, where the model continues from the largest coordinate of the image
    plus 1. So decoding continues on the time axis as without the reset. Images are recognised by coordinates that
    differ between axes, so the paper's reset of a video with timestamps between its frames (Qwen3-VL) applies to each
    frame, and an image of a single patch looks like text. A call must contain an image as a whole.

    Args:
        theta: the base; the released models have 1e6.
        sections: numbers of pairs of time, height and width, with the sum `rotary_dim / 2`. `None` is `(16, 24, 24)` of
            64, or `(24, 20, 20)` interleaved, in proportion.
            With `by_head`, numbers of key heads, with at most their sum; `None` is `(2, 3, 3)` of 8, in proportion.
        interleaved: whether the axes are interleaved instead of contiguous.
        rotary_dim: how many leading dimensions of a head are rotated, as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
        by_head: whether each axis has whole heads instead of pairs.
        spatial_reset: whether height and width are counted from 0 in each image.
        axes: the axis of every pair (0 time, 1 height, 2 width), instead of `sections`; for models with another order.
        inverse_frequencies: the frequency of every pair in radians per position, instead of `theta`.
    """

    name: ClassVar[str] = "mrope"

    theta: float = 1_000_000.0
    sections: tuple[int, ...] | None = option(None, minimum=0, least=len(AXES), most=len(AXES))
    interleaved: bool = option(False)
    rotary_dim: int | None = None
    layout: str = "auto"
    by_head: bool = option(False)
    spatial_reset: bool = option(False)
    axes: tuple[int, ...] | None = option(None, minimum=0, least=1)
    inverse_frequencies: tuple[float, ...] | None = option(None, minimum=0, maximum=LARGEST_FREQUENCY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_head and self.interleaved:
            raise ValueError(
                "MRopeConfig has both by_head and interleaved: whole heads belong to an axis, so there are no pairs to "
                "interleave. Give one of them."
            )
        if self.axes is None:
            return
        if max(self.axes) >= len(AXES):
            raise ValueError(f"MRopeConfig.axes is {self.axes}; expected 0 (time), 1 (height) or 2 (width) per pair.")
        if self.sections is not None or self.interleaved or self.by_head:
            raise ValueError(
                "MRopeConfig.axes states the axis of every pair, so `sections`, `interleaved` and `by_head` cannot be "
                "combined with it. Leave them out."
            )

    def rotation(self, context: BuildContext) -> MRopeMap:
        """The map of queries and keys.

        Raises:
            ValueError: as `frequencies`, or if the sections do not fit the rotary width.
        """
        spectrum = self.frequencies(context)
        if self.by_head:
            frequencies = self._of_heads(context.key_heads).unsqueeze(-1) * spectrum
        else:
            axis = self.axis_of_pair(len(spectrum))
            frequencies = torch.nn.functional.one_hot(axis, len(AXES)).T.float() * spectrum
        return MRopeMap(frequencies, self.layout, self.spatial_reset)

    def _of_heads(self, heads: int) -> Tensor:
        """`(axes, heads)`: 1 where a key head belongs to an axis."""
        sections = self.sections if self.sections is not None else default_head_sections(heads)
        if sum(sections) > heads or min(sections) < 0 or sum(sections) == 0:
            raise ValueError(
                f"MRopeConfig.sections is {sections}, {sum(sections)} heads, but this model has {heads} key heads. Use "
                f"sections that sum to {heads}, for example {default_head_sections(max(heads, len(AXES)))}."
            )
        owned = torch.eye(len(AXES), dtype=torch.float32, device="cpu")
        owned = owned.repeat_interleave(torch.tensor(sections, device="cpu"), dim=1)
        return torch.nn.functional.pad(owned, (0, heads - sum(sections)))

    def axis_of_pair(self, pairs: int) -> Tensor:
        """`(pairs,)` int64: 0, 1 or 2 for time, height or width.

        Raises:
            ValueError: if the options do not fit this number of pairs.
        """
        if self.axes is not None:
            if len(self.axes) != pairs:
                raise ValueError(
                    f"MRopeConfig.axes has the axes of {len(self.axes)} pairs, but {2 * pairs} rotated dimensions have "
                    f"{pairs}."
                )
            return torch.tensor(self.axes, device="cpu")
        suiting = default_sections(pairs, self.interleaved)
        sections = suiting if self.sections is None else self.sections
        if sum(sections) != pairs:
            raise ValueError(
                f"MRopeConfig.sections is {sections}, {sum(sections)} pairs, but {2 * pairs} rotated dimensions have "
                f"{pairs}. Use sections that sum to {pairs}, for example {suiting}."
            )
        if not self.interleaved:
            return torch.arange(len(AXES), device="cpu").repeat_interleave(torch.tensor(sections, device="cpu"))
        turns = [pair % len(AXES) for pair in range(sum(sections))]
        axes = [axis if pair < len(AXES) * sections[axis] else 0 for pair, axis in enumerate(turns)]
        for axis in (1, 2):
            if axes.count(axis) != sections[axis]:
                raise ValueError(
                    f"MRopeConfig.sections is {sections}, but interleaved in {sum(sections)} pairs {AXES[axis]} gets "
                    f"{axes.count(axis)} of its {sections[axis]}. Give height and width a third of the pairs or less."
                )
        return torch.tensor(axes, device="cpu")


def default_sections(pairs: int, interleaved: bool) -> tuple[int, int, int]:
    """Scales the released models' sections, which are (16, 24, 24) of 64 pairs, or (24, 20, 20) interleaved."""
    if interleaved:
        side = 20 * pairs // 64
        return pairs - 2 * side, side, side
    time = pairs // 4
    height = (pairs - time + 1) // 2
    return time, height, pairs - time - height


def default_head_sections(heads: int) -> tuple[int, int, int]:
    """Scales the sections of MHRoPE's authors, 2, 3 and 3 of 8 key heads.

    Raises:
        ValueError: if there are fewer heads than axes.
    """
    if heads < len(AXES):
        raise ValueError(
            f"MRopeConfig.by_head gives each of {len(AXES)} axes a key head, but this model has {heads}. Use "
            "interleaved=True, which needs a single head, or sections for the axes that should have one."
        )
    time = max(heads // 4, 1)
    height = (heads - time + 1) // 2
    return time, height, heads - time - height
