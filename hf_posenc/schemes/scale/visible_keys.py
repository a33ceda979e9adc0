"""The number of keys that a query sees."""

from __future__ import annotations

from torch import Tensor

from hf_posenc.schemes.positions import Positions


def visible_keys(positions: Positions, causal: bool) -> Tensor:
    """Returns the number of keys each query attends to, `(batch or 1, length)` float32, at least 1.

    This is the position plus one if queries see only the past, and the length of the sequence without padding
    otherwise. Sliding windows are ignored. Padding queries have one key.
    """

    def count() -> Tensor:
        visible = positions.ids + 1 if causal else positions.lengths.expand(-1, positions.ids.shape[-1])
        return visible.clamp(min=1).float()

    return positions.remembered(f"visible keys, {causal=}", count, positions.ids, positions.lengths)
