"""Images as grids of patches after prefix tokens, and what schemes make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.schemes import BuildContext, Positions, SchemeConfig, SchemeParts

HEADS, KEY_HEADS, HEAD_DIM, HIDDEN = 6, 3, 16, 24


def context(causal: bool = False) -> BuildContext:
    return BuildContext(HIDDEN, HEADS, HEAD_DIM, causal=causal, max_positions=64, num_key_value_heads=KEY_HEADS)


def image(*size: int, prefix: int = 0, shift: tuple[int, ...] | None = None, sized: bool = True) -> Positions:
    """The positions of one image, after `prefix` tokens without a place; `shift` moves all places."""
    axes = [torch.arange(one) + by for one, by in zip(size, shift or (0,) * len(size), strict=True)]
    coordinates = torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")])
    coordinates = torch.nn.functional.pad(coordinates, (prefix, 0)).unsqueeze(1)
    ids = torch.arange(coordinates.shape[-1]).unsqueeze(0)
    extents = torch.tensor(size).view(-1, 1, 1).expand_as(coordinates)
    return Positions(ids, ids[:, -1:] + 1, coordinates, extents=extents if sized else None, placed=ids >= prefix)


def parts_of(config: SchemeConfig, causal: bool = False) -> SchemeParts:
    """The parts with weights that are large enough to be seen."""
    torch.manual_seed(3)
    parts = config.build(context(causal))
    with torch.no_grad():
        for part in parts:
            part.eval()
            for parameter in part.parameters():
                if parameter.ndim > 1 and parts.query_key_map is None:
                    parameter.normal_()
    return parts


def heads_of(length: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of normally distributed numbers."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(1, HEADS, length, HEAD_DIM, generator=generator),
        torch.randn(1, KEY_HEADS, length, HEAD_DIM, generator=generator),
    )
