"""Padding: which tokens of a call are real, from any form of attention mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def padding_mask(mask: Any, stack: nn.Module, offset: int | Tensor | None) -> Tensor | None:
    """`(batch, key_len)`, 1 at real tokens, from any kind of mask; `None` if the mask does not show padding.

    `generate` may pass prepared masks, `(batch, 1, query_len, key_len)`, one for each kind of layer. In a layer without
    a window the last query sees exactly the real tokens, unless the caller passed a custom mask, for example with one
    block per packed document.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    elif isinstance(mask, Tensor) and mask.dim() == 4 and getattr(stack.config, "sliding_window", None):
        return None
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 4:
        if mask.shape[1] != 1:
            return None  # A separate mask for each head does not show which tokens are padding.
        # A finite penalty does not hide a key.
        visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
        last = visible[:, -1]
        # A single query sees what the last one sees.
        single = visible.shape[1] == 1
        if not single and not torch.compiler.is_compiling() and not _shows_padding_only(visible, offset):
            return None
        return last.to(torch.int64)
    return mask if mask.dim() == 2 else None


def _shows_padding_only(visible: Tensor, offset: int | Tensor | None) -> bool:
    """Whether every query sees the keys up to itself that the last query sees, and any of the later ones.

    The queries of an image see all its keys in Gemma 3 and PaliGemma.
    """
    last = visible[:, -1:]
    slots = torch.arange(visible.shape[2], device=visible.device)
    own = torch.arange(visible.shape[1], device=visible.device) + (0 if offset is None else offset)
    earlier = last & (slots <= own.unsqueeze(-1))
    # A padding token sees no keys, or all keys if a kernel does not support rows without keys.
    own_is_real = last[:, 0].gather(1, own.clamp(max=visible.shape[2] - 1).expand(visible.shape[0], -1)).unsqueeze(-1)
    idle = ~own_is_real & (visible == visible[..., :1]).all(-1, keepdim=True)
    return bool((((earlier <= visible) & (visible <= last)) | idle).all())


def counted_tokens(mask: Tensor) -> Tensor:
    """`(batch, key_len)` int64: 0, 1, 2, ... over the real tokens of each row, -1 at padding."""
    real = mask.to(torch.int64)
    return real.cumsum(-1) * real - 1
