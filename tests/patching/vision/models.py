"""Tiny models that read pictures, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import ViTForImageClassification

from tests.models import tiny

PATCH = 4


def vit(**options: Any) -> ViTForImageClassification:
    """A ViT whose attention is not uniform, so that positions matter."""
    torch.manual_seed(0)
    sizes = {"image_size": 4 * PATCH, "patch_size": PATCH, "num_labels": 5}
    model = tiny("ViTForImageClassification", **sizes, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def image(rows: int = 4, columns: int = 4, batch: int = 2) -> Tensor:
    """Fixed random pixels of a grid of patches."""
    shape = (batch, 3, rows * PATCH, columns * PATCH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def packed(*grids: list[int]) -> dict[str, Tensor]:
    """The patches of several images in one row, for the towers of Qwen-VL."""
    sizes = torch.tensor(grids)
    patches = torch.randn(int(sizes.prod(-1).sum()), 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(3))
    return {"hidden_states": patches, "grid_thw": sizes}
