"""Sinusoidal position vectors, in the four variants that models use."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.bias.relative_tables import angles_of_turns, turn_frequencies
from hf_posenc.schemes.grids import places, share_of_axes
from hf_posenc.schemes.parts import AdditiveEncoding, DeviceConstant, Positions, SchemeParts
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import check_base, check_strength, option

#: The orders of sines and cosines.
LAYOUTS = ("interleaved", "concatenated", "cosines_first")


class SinusoidalEncoding(AdditiveEncoding):
    """Sines and cosines of `(p + offset) * frequency`; of several coordinates, one after the other."""

    def __init__(self, config: SinusoidalConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = context.hidden_size
        self.axes = config.axes
        self.reads_coordinates = config.axes > 1
        self.order = range(config.axes)[:: -1 if config.columns_first else 1]
        pairs = share_of_axes(self.hidden_size // 2, config.axes)
        self.widths = [2 * count for count in pairs] if config.axes > 1 else [self.hidden_size]
        self._frequencies = [DeviceConstant(frequencies_of(width, config)) for width in self.widths]

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in float32; padding and tokens without a place get zeros.

        Raises:
            ValueError: for several axes, if the model passed no coordinates, or those of another number of axes.
        """
        coordinates, without = positions.ids.unsqueeze(0), positions.ids < 0
        if self.axes > 1:
            where = places(positions, self.axes, SinusoidalConfig.name)
            coordinates = where.coordinates
            without = without if where.placed is None else without | ~where.placed
        axes = zip(self.order, self._frequencies, self.widths, strict=True)
        parts = [self._vectors(coordinates[axis], frequencies, width) for axis, frequencies, width in axes]
        vectors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return _padded(vectors.masked_fill(without.unsqueeze(-1), 0.0), self.hidden_size)

    def _vectors(self, positions: Tensor, frequencies: DeviceConstant, width: int) -> Tensor:
        """`(*positions.shape, width)` in float32."""
        ids = positions + self.config.offset
        if self.config.frequencies == "vaswani":
            angles = angles_of_turns(ids, frequencies)
        else:
            # The models with these frequencies compute angles in float32. This reproduces them bit for bit.
            angles = ids.unsqueeze(-1).float() * frequencies.on(ids.device)
        sines, cosines = angles.sin(), angles.cos()
        vectors = self._lay_out(sines, cosines[..., : width // 2], width)
        return vectors if self.config.scale == 1.0 else vectors * self.config.scale

    def _lay_out(self, sines: Tensor, cosines: Tensor, width: int) -> Tensor:
        """Arranges sines and cosines to `(..., width)`; an odd width has an additional sine, or a zero at the end."""
        if self.config.layout != "interleaved":
            parts = (sines, cosines) if self.config.layout == "concatenated" else (cosines, sines)
            vectors = torch.cat(parts, dim=-1)
        else:
            count = cosines.shape[-1]
            vectors = torch.stack((sines[..., :count], cosines), dim=-1).flatten(-2)
            if count < sines.shape[-1]:
                vectors = torch.cat((vectors, sines[..., count:]), dim=-1)
        return _padded(vectors, width)


def _padded(vectors: Tensor, width: int) -> Tensor:
    """`(..., width)`, with zeros at the end."""
    more = width - vectors.shape[-1]
    return nn.functional.pad(vectors, (0, more)) if more else vectors


@register_scheme
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

    With two or three `axes`, each coordinate of a token on a grid has its own vector, of half or a third of the
    width, and the vectors are concatenated (MoCo v3, arXiv:2104.02057; MAE, arXiv:2111.06377)::

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
    part_class = SinusoidalEncoding

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
        return super().build(context)


def frequencies_of(hidden_size: int, config: SinusoidalConfig) -> Tensor:
    """Returns turns per position in float64 ("vaswani"), or radians per position in float32 ("tensor2tensor")."""
    if config.frequencies == "vaswani":
        return turn_frequencies(hidden_size, config.base).on(torch.device("cpu"))
    half = hidden_size // 2
    step = math.log(config.base) / (half - 1)
    return torch.exp(torch.arange(half, dtype=torch.int64, device="cpu").to(torch.float32) * -step)
