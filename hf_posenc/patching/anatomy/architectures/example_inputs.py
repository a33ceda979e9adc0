"""What arguments of short runs are made of. Numbers are fixed: the random generator of the caller is not used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Rows and columns of patches. All spatial merges divide it.
SIDE = 4
#: Frames of a spectrogram and samples of a wave, enough for 16 tokens after the usual convolutions.
FRAMES = 128
SAMPLES = 6480


def numbers(*shape: int) -> Tensor:
    """Normally distributed numbers, the same in every call."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def words(count: int) -> Tensor:
    """`(1, count)`: ids of tokens."""
    return torch.arange(5, 5 + count).unsqueeze(0)


def codes(tokens: int, streams: int) -> Tensor:
    """`(1, tokens, streams)`: a code of each stream for every token."""
    return (torch.arange(tokens).unsqueeze(1) + torch.arange(streams)).unsqueeze(0) % 16


def image_sides(config: Any) -> tuple[int, int]:
    """Height and width of an image in pixels."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def cut_patches(*shape: int) -> dict[str, Tensor]:
    """The arguments for an image that is cut into patches of a shape before."""
    return {"pixel_values": numbers(*shape), "grid_thw": torch.tensor([[1, SIDE, SIDE]])}
