"""Scales by the number of keys that a query sees."""

from __future__ import annotations

from torch import Tensor

from hf_posenc.schemes.config import BuildContext
from hf_posenc.schemes.parts import LogitScale, Positions


class VisibleKeysScale(LogitScale):
    """Base class of scales that count the keys of a query.

    Args:
        context: the place in the model.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.causal = context.causal
        self.length_dependent = not context.causal

    def visible_keys(self, positions: Positions) -> Tensor:
        """Returns the number of keys each query attends to, `(batch or 1, length)` float32, at least 1.

        This is the position plus one if queries see only the past, and the length of the sequence without padding
        otherwise. Sliding windows are ignored. Padding queries have one key.
        """
        causal = self.causal

        def count() -> Tensor:
            visible = positions.ids + 1 if causal else positions.lengths.expand(-1, positions.ids.shape[-1])
            return visible.clamp(min=1).float()

        return positions.remembered(f"visible keys, {causal=}", count, positions.ids, positions.lengths)
