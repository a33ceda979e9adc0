"""The same patches of a picture in other places."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.layouts import Grid

from .calling import Caller
from .inputs import call
from .population import MAPPINGS, class_name


@dataclasses.dataclass
class Shuffled:
    """A picture whose patches changed places, and where the model returns them.

    Args:
        order: the patch that is now in each place.
        prefix: number of tokens before the patches.
    """

    caller: Caller
    inputs: dict[str, Any]
    order: Tensor
    prefix: int

    @classmethod
    def of(cls, caller: Caller, stacks: list[Any]) -> Shuffled | None:
        """For a model whose last hidden state has one token per patch and some in front; `None` for others."""
        pixels = caller.inputs.get("pixel_values")
        grid = next((stack.layout for stack in stacks if isinstance(stack.layout, Grid)), None)
        projection = None if grid is None else grid.projection
        if not isinstance(projection, nn.Conv2d) or pixels is None or pixels.dim() != 4:
            return None
        if tuple(projection.kernel_size) != tuple(projection.stride) or set(caller.inputs) != {"pixel_values"}:
            return None
        model_type = caller.pair.model_type
        if model_type not in MAPPINGS["MODEL"] or type(caller.model).__name__ != class_name(model_type, "MODEL"):
            return None  # Heads may assign places to tokens, such as the queries of a decoder.
        hidden = getattr(call(caller.model, caller.inputs), "last_hidden_state", None)
        height, width = projection.kernel_size
        rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[0] != pixels.shape[0]:
            return None
        assert grid is not None
        prefix = hidden.shape[1] - rows * columns - grid.suffix_tokens
        if prefix < 0:
            return None
        order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(3))
        patches = pixels.unfold(2, height, height).unfold(3, width, width).flatten(2, 3)[:, :, order]
        shuffled = patches.unflatten(2, (rows, columns)).permute(0, 1, 2, 4, 3, 5).reshape(pixels.shape)
        return cls(caller, caller.inputs | {"pixel_values": shuffled}, order, prefix)

    def distance(self) -> float:
        """How far the tokens of the shuffled picture are from the tokens of the picture, shuffled."""
        hidden = call(self.caller.model, self.caller.inputs).last_hidden_state
        moved = call(self.caller.model, self.inputs).last_hidden_state
        end = self.prefix + len(self.order)
        patches = hidden[:, self.prefix : end][:, self.order]
        expected = torch.cat((hidden[:, : self.prefix], patches, hidden[:, end:]), dim=1)
        return float((moved - expected).abs().max() / hidden.std())
