"""Tiny models with random weights in which attention, and so position, decides the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.levels import Sizes
from benchmarks.lineup import base_model, place
from benchmarks.subjects import STOCK, Setting
from tests.matrix.running import strengthen

#: The levels of these models: a Llama with two heads of keys and values, and a BERT.
DECODER, ENCODER = "model", "encoder"
#: Kernels of GPUs want heads of at least 16 dimensions, and some of a power of two.
_SETTING = Setting(Sizes(128, 2, 4, 192, 96, num_key_value_heads=2), seed=1)


def build(kind: str, scheme: str) -> Any:
    """A model on the CPU in float32, patched, with eager attention; always the same weights.

    Args:
        kind: `DECODER` or `ENCODER`.
        scheme: a name of `list_schemes()`, or `STOCK` for the model's own positions.

    Raises:
        PositionEncodingError: if the model cannot take the scheme.
    """
    torch.manual_seed(0)
    model = base_model(kind, 4096, _SETTING)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                # Logits of attention then have a standard deviation of about 2: neither uniform nor a maximum.
                parameter.normal_(std=0.125)
    place(f"{scheme}@eager", model, kind)
    if scheme != STOCK:
        strengthen(model)
    return model.eval()


def tokens(length: int, batch: int = 2) -> Tensor:
    """`(batch, length)` on the CPU; always the same ones."""
    return _SETTING.tokens(length, batch)
