"""A text that is read in pieces behind a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def decoded(model: Any, ids: Tensor, cache: Any, pieces: Sequence[int], start: int = 0, **given: Tensor) -> Tensor:
    """The logits of all pieces, `(batch, tokens, vocabulary)`.

    Args:
        cache: is filled. If it is `None`, the model makes one.
        pieces: the number of tokens of each call.
        start: number of tokens that are in the cache already.
        **given: positions and masks with a column for every token. A mask shows all tokens so far.
    """
    steps = []
    for count in pieces:
        stop = start + count
        some = {name: values[:, 0 if "mask" in name else start : stop] for name, values in given.items()}
        output = model(ids[:, start:stop], **some, past_key_values=cache, use_cache=True)
        steps.append(output.logits)
        cache, start = output.past_key_values if cache is None else cache, stop
    return torch.cat(steps, dim=1)


def left_padding(length: int, padded: int) -> Tensor:
    """The mask of two rows, the second of which begins with padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :padded] = 0
    return mask
