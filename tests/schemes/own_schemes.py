"""Custom schemes that are functions of the distance. They are registered if a test asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from hf_posenc import learned_per_head, option
from hf_posenc.schemes import registry
from hf_posenc.schemes.bias.distance_function import config_of_function

from .table.row import Row


def root(distance: Tensor, head: Tensor, num_heads: int, scale: float = option(1.0, minimum=0)) -> Tensor:
    """Subtracts `scale * slope * sqrt(distance)` from the attention logits, with the slopes of ALiBi.

    Args:
        scale: factor of the slopes.
    """
    return -scale * 2.0 ** (-8 * head / num_heads) * distance.abs().sqrt()


def fading(distance: Tensor, slope: Tensor = learned_per_head(0.5), reach: int = 4) -> Tensor:
    """Subtracts a learned multiple of the logarithm of the distance."""
    return -slope * (distance.abs() / reach).log1p()


# As the decorator does, they take the names of the functions, by which they are pickled.
root = RootConfig = config_of_function(root)
fading = FadingConfig = config_of_function(fading, per_layer=True)

ROWS: dict[str, Row] = {
    "root": Row(
        "bias",
        lambda config, part, heads, causal, head, distance: (
            -config.scale * 2 ** (-8 * (head + 1) / heads) * math.sqrt(abs(distance))
        ),
        (RootConfig(), RootConfig(scale=3.0)),
    ),
    "fading": Row(
        "bias",
        lambda config, part, heads, causal, head, distance: (
            -part.slope[head].item() * math.log(1 + abs(distance) / config.reach)
        ),
        (FadingConfig(), FadingConfig(slope=-2.0, reach=30)),
    ),
}


def registered() -> dict[str, Any]:
    """The entries of the registry for these schemes."""
    return {config.name: config for config in (RootConfig, FadingConfig)}


@pytest.fixture(autouse=True, scope="module")
def own_schemes_are_registered() -> Iterator[None]:
    """For the tests of a module that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_SCHEMES", registry._SCHEMES | registered())
        yield
