"""Rotary position embedding over several axes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.grids import Places, places
from hf_posenc.schemes.parts import Positions, SchemeParts
from hf_posenc.schemes.rotary.rope import IN_PAIRS, ROPE_LAYOUTS, RotaryMap, resolve_rotary_dim
from hf_posenc.schemes.rotary.rotation_kernel import RotationFactors
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import check_base, option

ASSIGNMENTS = ("block", "split", "interleaved", "alternating", "golden", "mixed")
#: "half_by_axis" pairs dimensions within the block of each axis.
ND_LAYOUTS = (*ROPE_LAYOUTS, "half_by_axis")
AXIAL_THETA, MIXED_THETA = 100.0, 10.0


class CoordinateRotaryMap(RotaryMap):
    """Rotates each pair by the inner product of the token's coordinates and the pair's frequencies.

    Tokens without a place are not rotated.

    Args:
        frequencies: `(axes, rotary_dim / 2)` float32, radians per step along each axis; `(axes, key_value_heads,
            rotary_dim / 2)` if heads differ.
        layout: as in `RotaryMap`, or "half_by_axis".
        scheme: name of the scheme, for error messages.
        config: how coordinates are read, and the grid that tokens without any fill; `None` places these on the
            diagonal, at `(p, p, ...)`.
    """

    reads_coordinates = True
    reads_magnitude = False

    def __init__(self, frequencies: Tensor, layout: str, scheme: str, config: RopeNdConfig | None = None) -> None:
        super().__init__(frequencies, "half" if layout == "half_by_axis" else layout)
        self.axes = frequencies.shape[0]
        self.whole_heads = frequencies.ndim == 3
        self.scheme = scheme
        self.grid = None if config is None else config.grid
        self.num_prefix_tokens = 0 if config is None else config.num_prefix_tokens
        self.origin = 0 if config is None else config.origin
        self.normalized = config is not None and config.coordinates == "normalized"
        # Without the sizes of the grid, the number of rows follows from the length.
        self.length_dependent = self.normalized
        self.blocks = self.axes if layout == "half_by_axis" else 1

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses a cache if coordinates are divided by the size of a grid that grows with it."""
        if self.normalized and cached_length > 0:
            raise UnsupportedError(
                f"The {self.scheme!r} of this model reads coordinates relative to the size of the grid, which grows "
                f"from {cached_length} to {total_length} tokens. Use use_cache=False, or coordinates='index'."
            )

    def places(self, positions: Positions) -> Places:
        """Returns the caller's coordinates, or the token's place in the grid or on the diagonal."""
        if self.grid is None and positions.coordinates is None:
            return Places(positions.ids.expand(self.axes, *positions.ids.shape))
        return places(positions, self.axes, self.scheme, self.grid or (1,), self.num_prefix_tokens)

    def coordinates(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        """Returns the coordinates as the rotation reads them, `(axes, batch or 1, length)` float32, and which tokens
        have a place, `(batch or 1, length)` bool or `None` for all.
        """
        where = self.places(positions)
        if not self.normalized:
            coordinates = where.coordinates.float()
            return coordinates + self.origin if self.origin else coordinates, where.placed
        extents = where.extents if where.extents is not None else self._extents(positions)
        centres = (where.coordinates.float() + 0.5) / extents.clamp(min=1)
        return 2 * math.pi * (2.0 * centres - 1.0), where.placed

    def _extents(self, positions: Positions) -> Tensor:
        """`(axes, batch or 1, 1)`: the grid that a sequence fills, with as many rows as it needs."""
        if positions.coordinates is not None or self.grid is None:
            raise ValueError(
                f"The scheme {self.scheme!r} divides coordinates by the size of the grid, but the size of the grid of "
                "these tokens is unknown. Use coordinates='index'."
            )
        row = math.prod(self.grid)
        lengths = (positions.lengths - self.num_prefix_tokens).clamp(min=1)
        rows = torch.div(lengths + row - 1, row, rounding_mode="floor")
        return torch.stack([rows, *(torch.full_like(rows, size) for size in self.grid)])

    def angles(self, positions: Positions) -> Tensor:
        """`(batch or 1, length, rotary_dim / 2)` float32, with `key_value_heads` before the last axis if per head."""
        coordinates, placed = self.coordinates(positions)
        frequencies = self.inverse_frequencies(positions.lengths)
        coordinates = coordinates[(..., *(None for _ in frequencies.shape[1:]))]
        # A frequency of zero adds exactly zero, so an axis with its own pairs rotates as in one dimension.
        angles = coordinates[0] * frequencies[0]
        for axis in range(1, self.axes):
            angles = angles + coordinates[axis] * frequencies[axis]
        if placed is None:
            return angles
        return angles.where(placed[(..., *(None for _ in frequencies.shape[1:]))], 0.0)

    def for_both_of_pair(self, values: Tensor) -> Tensor:
        """Repeats a value per pair for both dimensions of the pair."""
        if self.blocks == 1:
            return super().for_both_of_pair(values)
        blocks = torch.unflatten(values, -1, (self.blocks, -1))
        return torch.cat((blocks, blocks), dim=-1).flatten(-2)

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the factors of queries and of keys, in the dtype of the heads."""
        if self.blocks == 1:
            return super().prepared(phases, dtype)
        return super().prepared(tuple(self._blocks_as_tokens(phase) for phase in phases), dtype)

    def map_query(self, query: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """Rotates queries `(batch, heads, query_len, head_dim)`; same shape and dtype."""
        if self.blocks == 1:
            return super().map_query(query, phases)
        if not isinstance(phases[0], RotationFactors):
            phases = self.prepared(phases, query.dtype)
        # Each block of a head is rotated like a separate head.
        turned = super().map_query(self._blocks_as_tokens(query[..., : self.rotary_dim]), phases)
        turned = torch.unflatten(turned, -2, (-1, self.blocks)).flatten(-2)
        return torch.cat((turned, query[..., self.rotary_dim :]), dim=-1)

    def map_key(self, key: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """Rotates keys `(batch, key_value_heads, query_len, head_dim)`; same shape and dtype."""
        return super().map_key(key, phases) if self.blocks == 1 else self.map_query(key, phases)

    def _blocks_as_tokens(self, x: Tensor) -> Tensor:
        """`(..., length, width)` to `(..., length * blocks, width / blocks)`."""
        return torch.unflatten(x, -1, (self.blocks, -1)).flatten(-3, -2)


@torch.no_grad()
def _turned_at_random_(frequencies: Tensor, axial: Tensor) -> None:
    """Sets learned frequencies to the axial ones, turned in a random direction for every head."""
    turned = [random_rotation(len(axial)) @ axial for _ in range(frequencies.shape[1])]
    frequencies.copy_(torch.stack(turned, dim=1))


class MixedRotaryMap(CoordinateRotaryMap):
    """A `CoordinateRotaryMap` with learned frequencies.

    Args:
        frequencies: `(axes, rotary_dim / 2)` float32, the axial blocks, which are rotated in a random direction for
            initialization.
        num_heads: number of heads with their own frequencies: the number of key heads, or 1 if heads share them.
        config: the options.
    """

    no_weight_decay = frozenset({"frequencies"})

    def __init__(self, frequencies: Tensor, num_heads: int, config: RopeNdConfig) -> None:
        super().__init__(frequencies, config.layout, config.name, config)
        self.whole_heads = num_heads > 1
        shape = (self.axes, num_heads, frequencies.shape[-1])
        self.frequencies = self.learned("frequencies", shape, _turned_at_random_, axial=frequencies)

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """The learned frequencies, `(axes, rotary_dim / 2)` or `(axes, key_value_heads, rotary_dim / 2)` float32."""
        frequencies = self.frequencies.float()
        return frequencies if self.whole_heads else frequencies.squeeze(1)


@register_scheme
class RopeNdConfig(SchemeConfig):
    """RoPE over two or three axes: axial, or with learned directions (RoPE-Mixed, arXiv:2403.13298).

    Pair `m` of the queries and keys of a token at the coordinates `P` is rotated by::

        angle_m = sum_a P_a F[a, m]            F of shape (axes, rotary_dim / 2)

    so that a logit depends only on coordinate differences. Tokens without a place (class and register tokens) are not
    rotated. With `n` pairs per axis, `F` is:

    =============  ====================================================================================
    assignment     F
    =============  ====================================================================================
    "block"        each axis has a block of pairs with its own full spectrum `theta**(-m / n)`
                   (RoPE-Axial; the vision towers of Qwen2-VL, Llama 4, DINOv3, SAM 2, Gemma 4)
    "split"        blocks too, but axis `a` gets frequency `a`, `a + axes`, ... of the one spectrum of RoPE (Pixtral)
    "interleaved"  the frequencies of "split", in the order of RoPE: pair `m` belongs to axis `m mod axes`
    "alternating"  the frequencies of "block", in the order of "interleaved" (Kimi K2.5)
    "golden"       `theta**(-m / pairs)` times a unit vector, different for each pair (jerryxio.ng/posts/nd-rope)
    "mixed"        all learned, per layer (RoPE-Mixed): initialised as "block", rotated in a random direction
    =============  ====================================================================================

    The unit vectors of "golden" are numbered through all pairs of the first head, then of the second, and so on. In two
    dimensions, vector `i` is at `i` times the golden angle, `pi (3 - sqrt(5))`. In three dimensions it is, as in the
    author's code, the direction of three normal quantiles of `i g**-1`, `i g**-2` and `i g**-3` modulo 1 (counted
    from `i = 1`), where `g**4 = g + 1`. Both sequences cover all directions evenly, however long they are.

    Pairs that do not divide evenly go to the first axes. Coordinates are those of the model: the place of a patch,
    (row, column) or (frame, row, column), or `position_ids` of several axes. A model without coordinates places token
    `p` in a grid: with `grid=(width,)` at `(p // width, p mod width)`. The paper's mixed frequencies differ between
    heads. Here query heads that share a key head share its frequencies, because otherwise logits would not be relative.
    The official code orders the axes as x, y; `columns_first` does so here. Learned frequencies are rounded when a
    model is cast to a 16-bit dtype: one part in 512 in bfloat16, a tenth of a radian at coordinate 50. The random
    shifts, jitters and rescalings of coordinates with which DINOv3 was trained are not part of the scheme.

    Args:
        theta: the base; `None` takes the paper's, 100, or 10 for "mixed".
        grid: one or two sizes in tokens, of all axes except the first: `(width,)` or `(height, width)`. Their number
            sets the number of axes. Coordinates of the model replace the grid. The default fits a ViT with 224 pixels
            in patches of 16.
        assignment: how pairs are assigned to axes.
        per_head: whether every key head learns its own frequencies ("mixed"), or has its own directions ("golden").
        num_prefix_tokens: number of tokens before the grid, such as a class token; they are not rotated.
        rotary_dim: how many leading dimensions of a head are rotated, as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`, or "half_by_axis", which pairs dimensions as "half" within the block of
            each axis (Gemma 4's vision tower).
        coordinates: "index" counts places; "normalized" reads place `i` of `n` as `2 pi (2 (i + 1/2) / n - 1)`, so that
            images of all resolutions have the same range (DINOv3).
        origin: the index of the first place; 1 in Llama 4, whose class token is at angle 0.
        columns_first: whether pairs are assigned to the last axis first (Llama 4, Kimi K2.5).
    """

    name: ClassVar[str] = "rope_nd"

    theta: float | None = option(None, check_base)
    grid: tuple[int, ...] = option((14,), minimum=1, least=1, most=2)
    assignment: str = option("block", choices=ASSIGNMENTS)
    per_head: bool = option(True)
    num_prefix_tokens: int = option(0, minimum=0)
    rotary_dim: int | None = option(None, minimum=2, even=IN_PAIRS)
    layout: str = option("auto", choices=ND_LAYOUTS)
    coordinates: str = option("index", choices=("index", "normalized"))
    origin: int = option(0, minimum=0)
    columns_first: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.assignment not in ("mixed", "golden") and not self.per_head:
            raise ValueError(
                f"RopeNdConfig.per_head is False, which shares frequencies between heads, but those of the "
                f"assignment {self.assignment!r} are fixed, and the same for all. Leave it out, or use 'mixed'."
            )
        if self.layout == "half_by_axis" and self.assignment != "block":
            raise ValueError(
                f"RopeNdConfig.layout is 'half_by_axis', which pairs dimensions within the block of an axis, but the "
                f"assignment {self.assignment!r} has no such blocks. Use the assignment 'block', or another layout."
            )
        if self.origin and self.coordinates == "normalized":
            raise ValueError(
                f"RopeNdConfig.origin is {self.origin}, but normalized coordinates are not counted. Leave it out, or "
                "use coordinates='index'."
            )

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether every layer learns its own frequencies."""
        return self.assignment == "mixed"

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a query-key map.

        Raises:
            ValueError: if the rotary width is odd, does not fit the head, or has fewer pairs than there are axes.
        """
        rotary_dim = resolve_rotary_dim(self, self.rotary_dim, context)
        axes = len(self.grid) + 1
        if rotary_dim // 2 < axes:
            raise ValueError(
                f"RopeNdConfig rotates {rotary_dim // 2} pairs of dimensions, fewer than its {axes} axes. Give "
                f"rotary_dim={2 * axes} or more, or a grid of fewer axes."
            )
        if self.layout == "half_by_axis" and rotary_dim % (2 * axes):
            raise ValueError(
                f"RopeNdConfig.layout is 'half_by_axis', which needs equal blocks for {axes} axes, but {rotary_dim} "
                f"dimensions are rotated. Give rotary_dim={rotary_dim // (2 * axes) * 2 * axes}, or another layout."
            )
        mixed = self.assignment == "mixed"
        theta = self.theta if self.theta is not None else MIXED_THETA if mixed else AXIAL_THETA
        heads = context.key_heads if self.per_head else 1
        if self.assignment == "golden":
            frequencies = golden_frequencies(theta, rotary_dim, axes, heads)
        else:
            frequencies = axial_frequencies(theta, rotary_dim, axes, "block" if mixed else self.assignment)
        if self.columns_first:
            frequencies = frequencies.flip(0)
        if mixed:
            return SchemeParts(query_key_map=MixedRotaryMap(frequencies, heads, self))
        return SchemeParts(query_key_map=CoordinateRotaryMap(frequencies, self.layout, self.name, self))


def axial_frequencies(theta: float, rotary_dim: int, axes: int, assignment: str) -> Tensor:
    """Returns `(axes, rotary_dim / 2)` float32 with one nonzero entry per column.

    Args:
        theta: the base.
        rotary_dim: number of rotated dimensions.
        axes: number of axes, at most the number of pairs.
        assignment: "block", "split", "interleaved" or "alternating", as in `RopeNdConfig`.
    """
    pairs = rotary_dim // 2
    owned = [torch.arange(axis, pairs, axes, device="cpu") for axis in range(axes)]
    frequencies = torch.zeros(axes, pairs, dtype=torch.float32, device="cpu")
    spectrum = rope_inverse_frequencies(theta, rotary_dim)
    start = 0
    for axis, columns in enumerate(owned):
        place = slice(start, start + len(columns)) if assignment in ("block", "split") else columns
        full_spectrum = assignment in ("block", "alternating")
        some = rope_inverse_frequencies(theta, 2 * len(columns)) if full_spectrum else spectrum[columns]
        frequencies[axis, place] = some
        start += len(columns)
    return frequencies


def golden_frequencies(theta: float, rotary_dim: int, axes: int, heads: int) -> Tensor:
    """Returns `(axes, heads, rotary_dim / 2)` float32, without the axis of heads if there is one head.

    Args:
        theta: the base.
        rotary_dim: number of rotated dimensions.
        axes: number of axes, 2 or 3.
        heads: number of key heads with their own directions.
    """
    pairs = rotary_dim // 2
    count = torch.arange(heads * pairs, dtype=torch.float64, device="cpu")
    if axes == 2:
        turns = count * (math.pi * (3 - math.sqrt(5)))
        directions = torch.stack((turns.cos(), turns.sin()))
    else:
        ratio = 1.0
        for _ in range(100):
            ratio = (1 + ratio) ** (1 / (axes + 1))
        steps = ratio ** -torch.arange(1, axes + 1, dtype=torch.float64, device="cpu")
        quantiles = torch.erfinv(2 * ((count + 1) * steps.unsqueeze(-1) % 1) - 1)
        directions = quantiles / quantiles.norm(dim=0)
    spectrum = rope_inverse_frequencies(theta, rotary_dim)
    frequencies = directions.view(axes, heads, pairs).float() * spectrum
    return frequencies if heads > 1 else frequencies.squeeze(1)


def random_rotation(axes: int) -> Tensor:
    """Draws a uniformly random rotation matrix, `(axes, axes)` float32 on the CPU."""
    if axes == 2:
        angle = float(torch.rand((), dtype=torch.float32, device="cpu")) * 2 * math.pi
        rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        return torch.tensor(rows, dtype=torch.float32, device="cpu")
    orthogonal = nn.init.orthogonal_(torch.empty(axes, axes, dtype=torch.float32, device="cpu"))
    orthogonal[:, 0] *= torch.linalg.det(orthogonal).sign()
    return orthogonal
