"""Places in the sequence for models that pass positions on three axes: time, height and width (M-RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.patching.call.cached_positions import recorded
from hf_posenc.patching.call.padding import counted_tokens

#: Number of axes of M-RoPE. A model may pass the place in the sequence before them.
AXES = 3


def places_in_sequence(
    position_ids: Tensor, cache: Any, offset: int | Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """The places of the new tokens in the sequence, for schemes with one axis.

    The patches of an image share one time, and the text after an image continues from its longest side. Time is
    therefore no place in the sequence. A row with an image has the places of the mask or the slots. A row without one
    has the positions that were passed.

    Args:
        position_ids: `(axes, batch, query_len)`; with four axes, the first is the place in the sequence.
        cache: the cache of the call, or `None`.
        offset: number of cached tokens.
        padding: `(batch, key_len)`, 1 at real tokens, or `None`.

    Returns:
        `(batch, query_len)`, or `None` for the places of the mask or the slots in every row.
    """
    if position_ids.shape[0] > AXES:
        return position_ids[0]
    if isinstance(offset, int) and offset == 0:
        length = position_ids.shape[-1]
        counted = torch.arange(length, device=position_ids.device).expand(position_ids.shape[1:])
        if padding is not None and padding.shape[1] >= length:
            counted = counted_tokens(padding.to(position_ids.device))[:, :length]
        is_text = (position_ids == position_ids[:1]).all(0).all(-1, keepdim=True)
        return position_ids[0].where(is_text, counted)
    known = recorded(cache)
    # After an image, all axes of a new token are equal, but shifted against its place in the sequence.
    return None if known is None or known.ids is None else position_ids[0]
