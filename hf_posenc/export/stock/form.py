"""A stock model that is expected to compute what a patched model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class StockForm:
    """A class of transformers with a config and weights.

    Args:
        model_class: class of the checkpoint.
        config: its config.
        state: its state dict.
        carrier: what carries the scheme, in a few words.
    """

    model_class: type[PreTrainedModel]
    config: Any
    state: dict[str, Tensor]
    carrier: str
