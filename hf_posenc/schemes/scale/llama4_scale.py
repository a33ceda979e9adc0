"""The attention temperature of Llama 4 and similar models."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.scale.visible_keys import VisibleKeysScale
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR


class Llama4Scale(VisibleKeysScale):
    """`1 + attention_scale * log(1 + floor((position + offset) / floor_scale))`."""

    def __init__(self, config: Llama4ScaleConfig, context: BuildContext) -> None:
        super().__init__(context)
        self.config = config

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, 1, length)` in float32."""
        config = self.config
        steps = torch.floor((self.visible_keys(positions) - 1 + config.offset) / config.floor_scale)
        return (1.0 + config.attention_scale * torch.log1p(steps)).unsqueeze(1)


@register_scheme
class Llama4ScaleConfig(SchemeConfig):
    """A temperature that rises in steps with position (Llama 4's code, after Scalable-Softmax, arXiv:2501.19399).

    For the query at position `i`::

        scale(i) = 1 + attention_scale * log(1 + floor((i + offset) / floor_scale))

    Nothing is learned. Llama 4 has `attention_scale=0.1`, `floor_scale=8192` and `offset=1`, and uses it in its layers
    without positions, also at lengths it was not trained on. Ministral 3 and Mistral 4 have the same formula with
    `offset=0`: `attention_scale` is their `llama_4_scaling_beta`, `floor_scale` their
    `original_max_position_embeddings`.

    These models are all causal. In a bidirectional model, `i` is the last position of the sequence for every query,
    because every query attends to all keys. The original models scale the query and have no bias. Here all logits of a
    query are scaled, including the bias of another scheme, as in Scalable-Softmax.

    Args:
        attention_scale: weight of the logarithm.
        floor_scale: number of tokens after which the temperature rises.
        offset: 1 as in Llama 4, 0 as in Ministral 3.
    """

    name: ClassVar[str] = "llama4_scale"
    part_class = Llama4Scale

    attention_scale: float = option(0.1, minimum=SMALLEST_FACTOR)
    floor_scale: int = option(8192, minimum=1)
    offset: int = option(1, minimum=0, maximum=1)
