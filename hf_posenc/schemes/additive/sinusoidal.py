"""Sinusoidal position vectors, in the four variants that models use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.relative_tables import angles_of_turns, turn_frequencies
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.device_constant import DeviceConstant
from hf_posenc.schemes.grids import places, share_of_axes
from hf_posenc.schemes.parts import AdditiveEncoding, SchemeParts
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_base, check_strength, option

#: The orders of sines and cosines.
LAYOUTS = ("interleaved", "concatenated", "cosines_first")


class SinusoidalEncoding(AdditiveEncoding):
    """Sines and cosines of `(p + offset) * frequency`.

    Args:
        hidden_size: width of the vectors.
        config: the variant.
    """

    def __init__(self, hidden_size: int, config: SinusoidalConfig) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.config = config
        self._frequencies = DeviceConstant(_frequencies(hidden_size, config))

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in float32; padding gets zeros."""
        return self.vectors(positions.ids).masked_fill((positions.ids < 0).unsqueeze(-1), 0.0)

    def vectors(self, positions: Tensor) -> Tensor:
        """Returns `(*positions.shape, hidden)` in float32."""
        ids = positions + self.config.offset
        if self.config.frequencies == "vaswani":
            angles = angles_of_turns(ids, self._frequencies)
        else:
            # The models with these frequencies compute angles in float32. This reproduces them bit for bit.
            angles = ids.unsqueeze(-1).float() * self._frequencies.on(ids.device)
        sines, cosines = angles.sin(), angles.cos()
        vectors = self._lay_out(sines, cosines[..., : self.hidden_size // 2])
        return vectors if self.config.scale == 1.0 else vectors * self.config.scale

    def _lay_out(self, sines: Tensor, cosines: Tensor) -> Tensor:
        """Arranges sines and cosines to `(..., hidden)`; an odd size has an additional sine, or a zero at the end."""
        if self.config.layout != "interleaved":
            parts = (sines, cosines) if self.config.layout == "concatenated" else (cosines, sines)
            vectors = torch.cat(parts, dim=-1)
        else:
            count = cosines.shape[-1]
            paired = torch.stack((sines[..., :count], cosines), dim=-1).flatten(-2)
            vectors = torch.cat((paired, sines[..., count:]), dim=-1)
        return torch.nn.functional.pad(vectors, (0, self.hidden_size - vectors.shape[-1]))


class GridSinusoidalEncoding(AdditiveEncoding):
    """The vectors of the coordinates of a token, one after the other; 0 for tokens without a place.

    Args:
        hidden_size: width of the vectors.
        config: the variant.
    """

    reads_coordinates = True

    def __init__(self, hidden_size: int, config: SinusoidalConfig) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.axes = config.axes
        self.order = list(range(config.axes))[:: -1 if config.columns_first else 1]
        widths = [2 * pairs for pairs in share_of_axes(hidden_size // 2, config.axes)]
        self.of_axes = [SinusoidalEncoding(width, config) for width in widths]

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in float32; padding gets zeros.

        Raises:
            ValueError: if the model passed no coordinates, or those of another number of axes.
        """
        where = places(positions, self.axes, SinusoidalConfig.name)
        parts = [one.vectors(where.coordinates[axis]) for one, axis in zip(self.of_axes, self.order, strict=True)]
        vectors = torch.cat(parts, dim=-1)
        without = positions.ids < 0
        if where.placed is not None:
            without = without | ~where.placed
        vectors = vectors.masked_fill(without.unsqueeze(-1), 0.0)
        return nn.functional.pad(vectors, (0, self.hidden_size - vectors.shape[-1]))


@register_scheme
@dataclass(frozen=True)
class SinusoidalConfig(SchemeConfig):
    """Adds sines and cosines of the position at geometric frequencies (arXiv:1706.03762, section 3.5).

    To components `2m` and `2m + 1` of a token at position p it adds, in the paper's variant::

        PE(p)_(2m)     = sin(p * base ** (-2m / hidden))
        PE(p)_(2m + 1) = cos(p * base ** (-2m / hidden))

    A shift by k is a fixed linear map: each pair is rotated by k times its frequency.

    ===============  ===============  ==================================================
    frequencies      layout           models
    ===============  ===============  ==================================================
    "vaswani"        "interleaved"    XLM, Flaubert, DistilBERT
    "vaswani"        "concatenated"   Marian, Pegasus, RoFormer, CTRL
    "tensor2tensor"  "concatenated"   M2M100, XGLM, Speech2Text, Whisper's encoder
    "tensor2tensor"  "cosines_first"  MusicGen
    "tensor2tensor"  "interleaved"    none, given for completeness
    ===============  ===============  ==================================================

    With two or three `axes`, each coordinate of a token on a grid has such a vector of its own, of half or a third of
    the width, and the vectors are concatenated (MoCo v3, arXiv:2104.02057; MAE, arXiv:2111.06377)::

        PE(row, column) = [PE(row), PE(column)]

    A token without a place (class and register tokens) gets zeros. Pairs of components that do not divide evenly go to
    the first axes. MAE and AIMv2 have `axes=2, layout="concatenated", columns_first=True`; RT-DETR has rows first.

    Args:
        frequencies: "vaswani", `base**(-2m / hidden)`; or "tensor2tensor", `base**(-m / (hidden // 2 - 1))`. For an odd
            hidden size, "vaswani" has one more sine and "tensor2tensor" a zero at the end.
        layout: "interleaved", alternating sines and cosines; "concatenated", all sines first; or "cosines_first".
        base: the longest wavelength is about `2 pi base`.
        scale: factor of the vectors, not 0.
        offset: added to the position; fairseq's descendants (M2M100) start at 2.
        axes: 1 for the order of the tokens, 2 for (row, column), 3 for (frame, row, column) of the model.
        columns_first: whether the last axis has the first components; only with several axes.
    """

    name: ClassVar[str] = "sinusoidal"

    frequencies: str = option("vaswani", choices=("vaswani", "tensor2tensor"))
    layout: str = option("interleaved", choices=LAYOUTS)
    base: float = option(10000.0, check_base)
    scale: float = option(1.0, check_strength)
    offset: int = option(0, minimum=0)
    axes: int = option(1, minimum=1, maximum=3)
    columns_first: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns_first and self.axes == 1:
            raise ValueError(
                "SinusoidalConfig.columns_first is True, but with axes=1 there are no columns. Leave it out, or give "
                "axes=2."
            )

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds an additive encoding.

        Raises:
            ValueError: if the hidden size is too small for the frequencies.
        """
        smallest = (4 if self.frequencies == "tensor2tensor" else 2) * self.axes
        if context.hidden_size < smallest:
            raise ValueError(
                f"SinusoidalConfig with frequencies={self.frequencies!r} and axes={self.axes} needs a hidden size of "
                f"at least {smallest}, got {context.hidden_size}."
            )
        encoding = SinusoidalEncoding if self.axes == 1 else GridSinusoidalEncoding
        return SchemeParts(additive=encoding(context.hidden_size, self))


def _frequencies(hidden_size: int, config: SinusoidalConfig) -> Tensor:
    """Returns turns per position in float64 ("vaswani"), or radians per position in float32 ("tensor2tensor")."""
    if config.frequencies == "vaswani":
        return turn_frequencies(hidden_size, config.base).on(torch.device("cpu"))
    half = hidden_size // 2
    step = math.log(config.base) / (half - 1)
    return torch.exp(torch.arange(half, dtype=torch.int64, device="cpu").to(torch.float32) * -step)
