"""How many keys a query sees."""

from __future__ import annotations

from torch import Tensor

from hf_posenc.schemes.positions import Positions


def visible_keys(positions: Positions, causal: bool) -> Tensor:
    """`(batch or 1, length)` float32, the number of keys each query chooses between; at least 1.

    Position plus one where queries see only the past, and the length of the sequence without its padding where they
    see all of it. Windows are not taken into account; padding queries count one key.
    """

    def count() -> Tensor:
        visible = positions.ids + 1 if causal else positions.lengths.expand(-1, positions.ids.shape[-1])
        return visible.clamp(min=1).float()

    return positions.remembered(f"visible keys, {causal=}", count, positions.ids, positions.lengths)
