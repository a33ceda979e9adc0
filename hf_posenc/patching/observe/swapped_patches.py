"""Swapping two patches of an image behind the patch projection, to see whether a stack depends on their order."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class PatchSwap:
    """Forward hook of a patch projection that swaps the first two patches of every image.

    Attributes:
        patches: number of patches of an image in the last call.
    """

    def __init__(self) -> None:
        self.patches = 0

    def __call__(self, projection: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Returns the output with two patches swapped."""
        if output.shape[2:].numel() == 1:
            # The patches were cut out before, and are the rows of a batch.
            self.patches = output.shape[0]
            return output[[1, 0, *range(2, output.shape[0])]]
        patches = output.flatten(2)
        self.patches = patches.shape[2]
        return patches[:, :, [1, 0, *range(2, self.patches)]].view_as(output)

    def order(self, tokens: int, suffix_tokens: int) -> list[int]:
        """The order of `tokens` tokens after the swap, with class tokens before the patches."""
        before = max(tokens - self.patches - suffix_tokens, 0)
        order = list(range(tokens))
        order[before : before + 2] = order[before : before + 2][::-1]
        return order
