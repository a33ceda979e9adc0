"""The grid of patches of one forward call: positions in one image, in several, and in parts of both."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from hf_posenc.patching.anatomy.rotary_functions import AXES
from hf_posenc.patching.call.cache import counted_tokens, recorded
from hf_posenc.patching.call.forward_state import UNKNOWN, ForwardState, one_axis
from hf_posenc.schemes.grids import grid_coordinates
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from hf_posenc.patching.call.runtime import StackRuntime


def in_raster(
    grid: tuple[int, ...],
    length: int,
    suffix_tokens: int,
    device: torch.device | None,
    memo: dict[Hashable, Any] | None = None,
) -> Positions:
    """The positions of `length` tokens in which the patches of a grid follow row by row.

    Args:
        grid: sizes of the grid.
        length: number of tokens. Those before the patches have no place.
        suffix_tokens: number of tokens without a place after the patches.
        device: device of the result.
        memo: as in `Positions`.
    """
    patches = math.prod(grid)
    before = length - suffix_tokens - patches
    ids = torch.arange(length, device=device).unsqueeze(0)
    slots = ids - before
    placed = (slots >= 0) & (slots < patches)
    sizes = torch.stack([ids.new_full((1, length), size) for size in grid])
    coordinates = grid_coordinates(slots.where(placed, 0), grid[1:])
    lengths, memo = ids.new_full((1, 1), length), {} if memo is None else memo
    return Positions(ids, lengths, coordinates, None, sizes, placed, grid, memo=memo).bounded(length)


def of_images(sizes: Tensor, length: int, memo: dict[Hashable, Any]) -> Positions:
    """The positions of a padded batch of images, each in raster order.

    Args:
        sizes: `(batch, axes)` int64.
        length: number of tokens of a row, padding included.
        memo: as in `Positions`.
    """
    slots = torch.arange(length, device=sizes.device).expand(sizes.shape[0], -1)
    patches = sizes.prod(-1, keepdim=True)
    placed = slots < patches
    coordinates = grid_coordinates(slots.where(placed, 0), [*sizes.T.unsqueeze(-1)[1:]])
    extents = sizes.T.unsqueeze(-1).expand(-1, -1, length)
    ids = slots.where(placed, -1)
    return Positions(ids, patches, coordinates, None, extents, placed, memo=memo).bounded(length)


def of_padded_images(shown: Tensor, memo: dict[Hashable, Any]) -> Positions:
    """The positions of images of different sizes, each in the corner of a common grid.

    Args:
        shown: `(batch, rows, columns)` bool, true at the patches of each image.
        memo: as in `Positions`.
    """
    sizes = torch.stack([shown[:, :, 0].sum(1), shown[:, 0].sum(1)])
    rows, columns = (torch.arange(size, device=shown.device) for size in shown.shape[1:])
    coordinates = torch.stack([rows.repeat_interleave(len(columns)), columns.repeat(len(rows))]).unsqueeze(1)
    extents = sizes.unsqueeze(-1).expand(-1, -1, shown[0].numel())
    placed = (coordinates < extents).all(0)
    # The number of a patch is the one that it has in its image alone.
    ids = (coordinates[0] * extents[1] + coordinates[1]).where(placed, -1)
    coordinates = coordinates.expand_as(extents).where(placed, 0)
    positions = Positions(ids, sizes.prod(0).unsqueeze(-1), coordinates, None, extents, placed, memo=memo)
    return positions.bounded(ids.shape[-1])


def packed(coordinates: Tensor, memo: dict[Hashable, Any], grid: tuple[int, ...] | None = None) -> Positions:
    """The positions of images that follow each other in one row.

    A patch at the origin begins an image, or a frame of a video.

    Args:
        coordinates: `(axes, 1, length)` int64, negative for class tokens.
        memo: as in `Positions`.
        grid: the sizes of every image, if they are known and equal.
    """
    placed = (coordinates >= 0).all(0)
    image = ((coordinates[:, 0] == 0).all(0).cumsum(0) - 1).clamp(min=0)
    coordinates = coordinates.clamp(min=0)
    rows = coordinates[:, 0]
    # As many images as tokens at most, so that no value is read from the device.
    most = rows.new_zeros(rows.shape).scatter_reduce(1, image.expand_as(rows), rows, "amax")
    extents = (most.index_select(1, image) + 1).unsqueeze(1)
    slots = torch.arange(rows.shape[1], device=rows.device)
    first = slots.new_full((rows.shape[1],), rows.shape[1]).scatter_reduce(0, image, slots, "amin")
    ids = (slots - first.index_select(0, image)).unsqueeze(0)
    positions = Positions(ids, ids.amax(-1, keepdim=True) + 1, coordinates, None, extents, placed, grid, memo=memo)
    return positions.bounded(ids.shape[-1])


def merged(coordinates: Tensor) -> Tensor:
    """The coordinates of patches that were merged two by two, in the order of the first patch of each.

    Args:
        coordinates: `(axes, 1, length)` int64 of the patches, rows and columns last.
    """
    first = (coordinates[-2:, 0] % 2 == 0).all(0)
    places = coordinates[..., first]
    return torch.cat([places[:-2], places[-2:] // 2])


def selected(positions: Positions, indices: Tensor, memo: dict[Hashable, Any]) -> Positions:
    """Some of the tokens, in another order.

    Args:
        positions: the positions of all tokens.
        indices: `(batch or 1, length)` int64.
        memo: as in `Positions`.
    """

    def take(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        rows = max(values.shape[-2], indices.shape[0])
        shape = (*values.shape[:-2], rows, -1)
        return values.expand(shape).gather(-1, indices.expand(*values.shape[:-2], rows, -1))

    ids = cast("Tensor", take(positions.ids))
    coordinates, extents, placed = map(take, (positions.coordinates, positions.extents, positions.placed))
    chosen = Positions(ids, positions.lengths, coordinates, None, extents, placed, positions.grid, memo=memo)
    return chosen.bounded(positions.ids.shape[-1])


Sizes = tuple[int, ...]
#: `(images, 2)`: the rows and columns of each image of a padded batch of patches.
_SIZES = "spatial_shapes"
#: `(images, rows, columns)`: true at the patches of each image of a padded batch.
_SHOWN = "patch_attention_mask"
#: `(images, 3)`: the frames, rows and columns of images that are packed in one row.
_PACKED = "grid_thw"
#: `(images, 2)`: the rows and columns of images that are packed in one row, each in raster order.
_PACKED_SIZES = "target_sizes"
#: A mask of patches that may be dropped: true where a patch is hidden.
_HIDDEN = "bool_masked_pos"
#: The function with which a model computes the `(patches, 2)` rows and columns of packed images, in the order in which
#: it merges patches.
_PLACES = "get_vision_position_ids"


@dataclass
class GridState(ForwardState):
    """The positions of one forward call of a stack whose input is pixels.

    The number of tokens differs between its modules: a table has rows for class tokens or not, registers are added
    later, and layers may work in windows. Each therefore asks for the positions of as many tokens as it has.

    Args:
        grid: sizes of the grid of every image, `(rows, columns)` or `(frames, rows, columns)`; set when the patches are
            projected.
        suffix_tokens: number of tokens without a place that follow the patches.
        pixels: `(height, width)` that a module which compares sizes has got.
        sizes: `(batch, axes)` int64, if the images of a padded batch have grids of different sizes.
        shown_patches: `(batch, rows, columns)` bool, the patches of each image in a padded batch, from the first row
            and column on.
        coordinates: `(axes, 1, length)` that the model passes to its rotary module, for images packed in one row.
        common: the sizes of each image of such a row, if they are equal.
        single: whether it is a single image, so that its patches have the numbers of their slots.
        hidden_patches: `(batch, patches)` bool, the patches that the model may drop.
        kept: `(batch, patches)` int64, the patches in raster order that remain after others were dropped.
    """

    grid: Sizes | None = None
    suffix_tokens: int = 0
    pixels: Sizes | None = None
    sizes: Tensor | None = None
    shown_patches: Tensor | None = None
    common: Sizes | None = None
    single: bool = False
    hidden_patches: Tensor | None = None
    kept: Tensor | None = None
    has_places: ClassVar[bool] = True

    @property
    def is_known(self) -> bool:
        """Whether the grid of the call is known."""
        return self.grid is not None or self.coordinates is not None or self.sizes is not None

    def table_length(self, prefix_rows: int) -> int:
        """Number of vectors that stand in for a table with `prefix_rows` before those of the patches."""
        if self.coordinates is not None:
            return self.coordinates.shape[-1]
        assert self.grid is not None
        return prefix_rows + math.prod(self.grid) + self.suffix_tokens

    def by_slots(self, length: int, window: Sizes | None = None) -> ForwardState:
        """The state of a module with `length` tokens: those of the grid, and others without a place around them.

        Args:
            length: number of tokens.
            window: sizes of the windows in which the module works, if it may.
        """
        tokens = ForwardState(length, device=self.device, memo=self.memo, of_grid=True, numbered=self.numbered)
        given = None
        if window is not None and math.prod(window) == length:
            tokens.placed = in_raster(window, length, 0, self.device, self.memo)
        elif self.coordinates is not None and self.coordinates.shape[-1] == length:
            given = packed(self.coordinates, self.memo, self.common)
        elif self.coordinates is not None and self.coordinates.shape[-1] == 4 * length:
            coarse = merged(self.coordinates)
            given = packed(coarse, {}) if coarse.shape[-1] == length else None
        elif self.shown_patches is not None and self.shown_patches[0].numel() == length:
            given = of_padded_images(self.shown_patches, self.memo)
        elif self.sizes is not None:
            tokens.placed = of_images(self.sizes, length, self.memo)
        elif self.grid is not None:
            given = self._of_kept(self.grid, length)
            if given is None and length - math.prod(self.grid) >= self.suffix_tokens:
                tokens.placed = in_raster(self.grid, length, self.suffix_tokens, self.device, self.memo)
        if given is not None:
            tokens.placed, tokens.position_ids = given, None if self.single else given.ids
        return tokens

    def numbered_phases(self, phases: Any, position_ids: Any) -> Any:
        """Numbers of tokens in the shape of phases, `(tokens, width)` each, if these are computed of coordinates."""
        if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or not {2, 3} & {*position_ids.shape}:
            return phases  # The positions have one axis.
        self.coordinates = (position_ids.T if position_ids.shape[1] in (2, 3) else position_ids).unsqueeze(1).long()
        self.numbered = True
        return _numbered(phases)

    def _of_kept(self, grid: Sizes, length: int) -> Positions | None:
        """The positions of the patches that remain after others were dropped; `None` if none were."""
        kept = self.kept
        if kept is None and self.hidden_patches is not None:
            shown = (~self.hidden_patches.bool().flatten(1)).nonzero()[:, 1]
            kept = shown.reshape(self.hidden_patches.shape[0], -1)
        if kept is None or length - math.prod(grid) >= self.suffix_tokens:
            return None
        before = length - kept.shape[1] - self.suffix_tokens
        whole = in_raster(grid, before + math.prod(grid) + self.suffix_tokens, self.suffix_tokens, kept.device)
        class_tokens = torch.arange(before, device=kept.device).expand(kept.shape[0], -1)
        return selected(whole, torch.cat([class_tokens, kept + before], dim=1), self.memo)


def in_order(state: ForwardState, numbers: Tensor) -> ForwardState:
    """The state of some tokens of a module, in the order of their numbers, `(length,)`."""
    chosen = selected(state.positions(), numbers.unsqueeze(0), state.memo)
    return ForwardState(
        len(numbers), position_ids=chosen.ids, device=state.device, memo=state.memo, of_grid=True, placed=chosen
    )


def grid_state(stack: nn.Module, suffix_tokens: int, arguments: Mapping[str, Any]) -> GridState:
    """The state of a call, as far as its arguments show the grids."""
    state = GridState(UNKNOWN, suffix_tokens=suffix_tokens)
    given = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    state.grid = _of_features(stack.config, given.values()) or _of_pixels(stack.config, pixels_among(given.values()))
    if _SIZES in given:
        state.sizes = given[_SIZES].long()
    shown = given.get(_SHOWN)
    # Whole images may be treated as padded ones, so a mask on a device is not read.
    if shown is not None and shown.dim() == 3 and not (shown.is_cpu and shown.all()):
        state.shown_patches = shown.bool()
    state.hidden_patches = given.get(_HIDDEN)
    if _PACKED_SIZES in given:
        sizes = given[_PACKED_SIZES]
        grids = [torch.cartesian_prod(*(torch.arange(size) for size in image)) for image in sizes.tolist()]
        state.coordinates = torch.cat(grids).T.unsqueeze(1).to(sizes.device)
    places = inspect.unwrap(type(stack).forward).__globals__.get(_PLACES)
    if _PACKED in given and places is not None:
        # A stack whose patches are merged after it has them row by row, whatever its config says.
        merge = getattr(stack, "spatial_merge_size", 1)
        # The host needs the sizes, so places are made there, and copied.
        sizes = given[_PACKED].cpu()
        state.coordinates = places(sizes, merge).T.unsqueeze(1).long().to(given[_PACKED].device)
        frames, of_frames = int(sizes[:, 0].sum()), {(rows, columns) for _, rows, columns in sizes.tolist()}
        state.common, state.single = of_frames.pop() if len(of_frames) == 1 else None, frames == 1
    return state


def pixels_among(values: Iterable[Any]) -> Sizes | None:
    """`(height, width)` of the first pictures or videos among arguments."""
    pixels = (value for value in values if isinstance(value, Tensor) and value.dim() in (4, 5))
    return next((tuple(value.shape[-2:]) for value in pixels), None)


def _of_features(config: Any, values: Iterable[Tensor]) -> Sizes | None:
    """The grid of features that another encoder has made of the patches: `(batch, hidden, rows, columns)`."""
    hidden = getattr(config, "hidden_size", None)
    features = (value for value in values if value.dim() == 4 and value.shape[1] == hidden)
    return next((tuple(value.shape[-2:]) for value in features), None)


def _of_pixels(config: Any, pixels: Sizes | None) -> Sizes | None:
    """The grid of whole images, until the projection shows it, and for stacks without a known projection."""
    patch = getattr(config, "patch_size", None)
    if pixels is None or patch is None:
        return None
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]
    rows, columns = (int(size) // int(side) for size, side in zip(pixels, sides, strict=True))
    return (rows, columns) if rows and columns else None


def _numbered(phases: Any) -> Any:
    """Numbers in the shape of phases, `(tokens, width)`: every value of a token is its number."""
    if isinstance(phases, tuple):
        return tuple(map(_numbered, phases))
    numbers = torch.arange(phases.shape[-2], device=phases.device, dtype=torch.float32)
    return numbers.unsqueeze(-1).expand(phases.shape)


def numbers_in(phases: Any) -> Tensor:
    """`(length,)` int64: the numbers of the tokens of a layer, from the phases that it received."""
    values: Tensor = phases[0] if isinstance(phases, tuple) else phases
    return values[..., 0].reshape(-1).long()


def places_in_sequence(
    position_ids: Tensor, cache: Any, offset: int | Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """The places of the new tokens in the sequence, for schemes with one axis.

    The patches of an image share one time, and the text after an image continues from its longest side. Time is
    therefore not a place in the sequence. A row with an image has the places of the mask or the slots. A row without an
    image has the positions that were passed.

    Args:
        position_ids: `(axes, batch, query_len)`; with four axes, the first is the place in the sequence.
        cache: the cache of the call, or `None`.
        offset: number of cached tokens.
        padding: `(batch, key_len)`, 1 at real tokens, or `None`.

    Returns:
        `(batch, query_len)`, or `None` for the places of the mask or the slots in every row.
    """
    if position_ids.shape[0] > AXES:
        return position_ids[0]
    if isinstance(offset, int) and offset == 0:
        length = position_ids.shape[-1]
        counted = torch.arange(length, device=position_ids.device).expand(position_ids.shape[1:])
        if padding is not None and padding.shape[1] >= length:
            counted = counted_tokens(padding.to(position_ids.device))[:, :length]
        is_text = (position_ids == position_ids[:1]).all(0).all(-1, keepdim=True)
        return position_ids[0].where(is_text, counted)
    known = recorded(cache)
    # After an image, all axes of a new token are equal, but shifted against its place in the sequence.
    return None if known is None or known.ids is None else position_ids[0]


def split_axes(
    position_ids: Tensor, runtime: StackRuntime, cache: Any, offset: int | Tensor | None, padding: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Splits position ids into `(batch, query_len)` and, for multi-axis schemes, `(axes, batch, query_len)`.

    Qwen's models may prepend the position in the sequence to time, height and width.
    """
    if not position_ids.is_floating_point():
        position_ids = position_ids.long()
    if position_ids.dim() != 3 or not (runtime.reads_coordinates or runtime.makes_coordinates):
        return one_axis(position_ids), None
    coordinates = position_ids[-AXES:] if runtime.reads_coordinates else None
    return places_in_sequence(position_ids, cache, offset, padding), coordinates
