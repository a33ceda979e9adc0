"""Rotary position embedding over several axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.rotary.grids import check_grid, given_coordinates, grid_coordinates
from hf_posenc.schemes.rotary.rope import ROPE_LAYOUTS, RotaryMap, check_rotary_dim, key_heads, resolve_rotary_dim
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies
from hf_posenc.schemes.validation import check_base, check_boolean, check_choice, check_integer

ASSIGNMENTS = ("block", "split", "interleaved", "mixed")
AXIAL_THETA, MIXED_THETA = 100.0, 10.0


class CoordinateRotaryMap(RotaryMap):
    """Rotates each pair by the inner product of the token's coordinates and the pair's frequencies.

    Args:
        frequencies: `(axes, rotary_dim / 2)` float32, radians per step along each axis.
        layout: as in `RotaryMap`.
        scheme: name of the scheme, for error messages.
        grid: the grid that tokens without coordinates fill; `None` places them on the diagonal, at `(p, p, ...)`.
        num_prefix_tokens: number of tokens before the grid.
    """

    reads_coordinates = True

    def __init__(
        self,
        frequencies: Tensor,
        layout: str,
        scheme: str,
        grid: tuple[int, ...] | None = None,
        num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__(frequencies, layout)
        self.axes = frequencies.shape[0]
        self.scheme = scheme
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens

    def coordinates(self, positions: Positions) -> Tensor:
        """Returns the caller's coordinates, or the token's place in the grid, `(axes, batch or 1, length)`."""
        given = given_coordinates(positions, self.axes, self.scheme)
        if given is not None:
            return given
        if self.grid is None:
            return positions.ids.expand(self.axes, *positions.ids.shape)
        return grid_coordinates(positions.ids, self.grid, self.num_prefix_tokens)

    def angles(self, positions: Positions) -> Tensor:
        """`(batch or 1, length, rotary_dim / 2)` float32."""
        frequencies = self._constants.on(positions.ids.device)
        # A frequency of zero adds exactly zero, so an axis with its own pairs rotates as in one dimension.
        return (self.coordinates(positions).unsqueeze(-1).float() * frequencies[:, None, None]).sum(0)


class MixedRotaryMap(CoordinateRotaryMap):
    """A `CoordinateRotaryMap` with learned frequencies.

    Args:
        frequencies: `(axes, rotary_dim / 2)` float32, the axial blocks, which are rotated in a random direction for
            initialization.
        num_heads: number of heads with their own frequencies: the number of key heads, or 1 if heads share them.
        layout: as in `RotaryMap`.
        grid: as in `CoordinateRotaryMap`.
        num_prefix_tokens: as in `CoordinateRotaryMap`.
    """

    no_weight_decay = frozenset({"frequencies"})

    def __init__(
        self, frequencies: Tensor, num_heads: int, layout: str, grid: tuple[int, ...], num_prefix_tokens: int
    ) -> None:
        super().__init__(frequencies, layout, "rope_nd", grid, num_prefix_tokens)
        self.whole_heads = num_heads > 1
        self.frequencies = nn.Parameter(torch.empty(self.axes, num_heads, frequencies.shape[-1]))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rotates the axial frequencies of every head in a random direction."""
        axial = self._constants.on(torch.device("cpu"))
        turned = [_random_rotation(self.axes) @ axial for _ in range(self.frequencies.shape[1])]
        self.frequencies.copy_(torch.stack(turned, dim=1))

    def angles(self, positions: Positions) -> Tensor:
        """`(batch or 1, length, rotary_dim / 2)` float32, with `key_value_heads` before the last axis if per head."""
        coordinates = self.coordinates(positions)[..., None, None].float()
        angles = (coordinates * self.frequencies.float()[:, None, None]).sum(0)
        return angles if self.whole_heads else angles.squeeze(-2)


@register_scheme
@dataclass(frozen=True)
class RopeNdConfig(SchemeConfig):
    """RoPE over two or three axes: axial, or with learned directions (RoPE-Mixed, arXiv:2403.13298).

    Pair `m` of the queries and keys of a token at the coordinates `P` is rotated by::

        angle_m = sum_a P_a F[a, m]            F of shape (axes, rotary_dim / 2)

    so that a logit depends only on coordinate differences. With `n` pairs per axis, `F` is:

    =============  ====================================================================================
    assignment     F
    =============  ====================================================================================
    "block"        each axis has a block of pairs with its own full spectrum `theta**(-m / n)`
                   (RoPE-Axial; the vision towers of Qwen2-VL and Llama 4)
    "split"        blocks too, but axis `a` gets frequency `a`, `a + axes`, ... of the one spectrum of RoPE (Pixtral)
    "interleaved"  the frequencies of "split", in the order of RoPE: pair `m` belongs to axis `m mod axes`
    "mixed"        all learned, per layer (RoPE-Mixed): initialised as "block", rotated in a random direction
    =============  ====================================================================================

    Pairs that do not divide evenly go to the first axes. Coordinates are the `position_ids` of several axes that the
    model passes, or otherwise the token's place in the grid: with `grid=(width,)` token `p` is at `(p // width, p mod
    width)`. The paper's mixed frequencies differ between heads. Here query heads that share a key head share its
    frequencies, because otherwise logits would not be relative. The official code orders the axes as x, y; here the
    caller chooses the order. Learned frequencies are rounded when a model is cast to a 16-bit dtype: one part in 512 in
    bfloat16, a tenth of a radian at coordinate 50.

    Args:
        theta: the base; `None` takes the paper's, 100, or 10 for "mixed".
        grid: one or two sizes in tokens, of all axes except the first: `(width,)` or `(height, width)`. The default
            fits a ViT with 224 pixels in patches of 16.
        assignment: how pairs are assigned to axes.
        per_head: for "mixed", whether every key head learns its own frequencies.
        num_prefix_tokens: number of tokens before the grid, such as a class token; they are not rotated.
        rotary_dim: how many leading dimensions of a head are rotated, as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "rope_nd"

    theta: float | None = None
    grid: tuple[int, ...] = (14,)
    assignment: str = "block"
    per_head: bool = True
    num_prefix_tokens: int = 0
    rotary_dim: int | None = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        check_base(self, "theta", optional=True)
        check_grid(self)
        check_choice(self, "assignment", ASSIGNMENTS)
        check_boolean(self, "per_head")
        check_integer(self, "num_prefix_tokens", minimum=0)
        check_rotary_dim(self)
        check_choice(self, "layout", ROPE_LAYOUTS)
        if self.assignment != "mixed" and not self.per_head:
            raise ValueError(
                f"RopeNdConfig.per_head is False, which shares learned frequencies between heads, but those of the "
                f"assignment {self.assignment!r} are fixed, and the same for all. Leave it out, or use 'mixed'."
            )
        if len(self.grid) > 2:
            raise ValueError(
                f"RopeNdConfig.grid is {self.grid}, which makes {len(self.grid) + 1} axes; expected one size for two "
                "axes or two sizes for three."
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
        mixed = self.assignment == "mixed"
        theta = self.theta if self.theta is not None else MIXED_THETA if mixed else AXIAL_THETA
        frequencies = axial_frequencies(theta, rotary_dim, axes, "block" if mixed else self.assignment)
        if mixed:
            num_heads = key_heads(context) if self.per_head else 1
            part = MixedRotaryMap(frequencies, num_heads, self.layout, self.grid, self.num_prefix_tokens)
            return SchemeParts(query_key_map=part)
        return SchemeParts(
            query_key_map=CoordinateRotaryMap(frequencies, self.layout, self.name, self.grid, self.num_prefix_tokens)
        )


def axial_frequencies(theta: float, rotary_dim: int, axes: int, assignment: str) -> Tensor:
    """Returns `(axes, rotary_dim / 2)` float32 with one nonzero entry per column.

    Args:
        theta: the base.
        rotary_dim: number of rotated dimensions.
        axes: number of axes, at most the number of pairs.
        assignment: "block", "split" or "interleaved", as in `RopeNdConfig`.
    """
    pairs = rotary_dim // 2
    owned = [torch.arange(axis, pairs, axes, device="cpu") for axis in range(axes)]
    frequencies = torch.zeros(axes, pairs, dtype=torch.float32, device="cpu")
    spectrum = rope_inverse_frequencies(theta, rotary_dim)
    start = 0
    for axis, columns in enumerate(owned):
        block = slice(start, start + len(columns))
        if assignment == "interleaved":
            frequencies[axis, columns] = spectrum[columns]
        elif assignment == "split":
            frequencies[axis, block] = spectrum[columns]
        else:
            frequencies[axis, block] = rope_inverse_frequencies(theta, 2 * len(columns))
        start += len(columns)
    return frequencies


def _random_rotation(axes: int) -> Tensor:
    """Draws a uniformly random rotation matrix, `(axes, axes)` float32 on the CPU."""
    if axes == 2:
        angle = float(torch.rand((), dtype=torch.float32, device="cpu")) * 2 * math.pi
        rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        return torch.tensor(rows, dtype=torch.float32, device="cpu")
    orthogonal, triangular = torch.linalg.qr(torch.randn(axes, axes, dtype=torch.float32, device="cpu"))
    orthogonal = orthogonal * triangular.diagonal().sign()
    orthogonal[:, 0] *= torch.linalg.det(orthogonal).sign()
    return orthogonal
