"""What one forward call of a stack knows about the positions of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.positions import Positions


@dataclass
class ForwardState:
    """Positions of one forward call, resolved once, with a scratch space shared by its layers.

    Args:
        query_length: number of new tokens.
        offset: number of cached slots before them; a 0-dim tensor for static caches, `None` if unknown.
        position_ids: `(batch or 1, query_len)` as the caller gave them, or `None`.
        attention_mask: `(batch, key_len)` padding mask (1 = real token) as the caller gave it, or `None`.
    """

    query_length: int
    offset: int | Tensor | None = 0
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    #: `position_ids` as the model itself handed them to its rotary module.
    rotary_position_ids: Tensor | None = None
    cache: dict[Hashable, Any] = field(default_factory=dict)

    def slot_offset(self, query_length: int, key_length: int) -> int | Tensor:
        """Index of the first query among all slots seen so far."""
        return key_length - query_length if self.offset is None else self.offset

    def mask_positions(self) -> Tensor | None:
        """`(batch, query_len)` counted over real tokens only, -1 at padding; `None` without a usable mask."""
        mask, offset = self.attention_mask, self.offset
        if mask is None or offset is None:
            return None
        counted = mask.to(torch.int64).cumsum(-1) * mask.to(torch.int64) - 1
        if isinstance(offset, Tensor):
            slots = torch.arange(self.query_length, device=mask.device) + offset.to(mask.device)
            return counted.index_select(1, slots.clamp(max=mask.shape[1] - 1))
        if mask.shape[1] < offset + self.query_length:
            return None
        return counted[:, offset : offset + self.query_length]

    def positions(self, device: torch.device) -> Positions:
        """The positions of the new tokens, for parts that act outside any native mechanism."""
        return self.shared("positions", lambda: self._resolve(device))

    def _resolve(self, device: torch.device) -> Positions:
        if self.position_ids is not None:
            return self.with_lengths(self.position_ids.to(device))
        counted = self.mask_positions()
        if counted is not None:
            return self.with_lengths(counted.to(device))
        start = 0 if self.offset is None else self.offset
        return self.with_lengths((torch.arange(self.query_length, device=device) + start).unsqueeze(0))

    def rotary_positions(self, device: torch.device) -> Positions:
        """The positions the model's own rotary module was given, else `positions`."""
        ids = self.rotary_position_ids
        if ids is None:
            return self.positions(device)
        return self.shared(("rotary", id(ids)), lambda: self.with_lengths(one_axis(ids).to(device)))

    def with_lengths(self, ids: Tensor) -> Positions:
        """Attaches the number of real tokens per sequence: from the mask, else from the last position."""
        mask = self.attention_mask
        if mask is not None:
            lengths = mask.to(torch.int64).sum(-1, keepdim=True).to(ids.device)
        else:
            lengths = ids.amax(-1, keepdim=True) + 1
        return Positions(ids=ids, lengths=lengths)

    def shared(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, once per forward.

        A value that requires grad is computed anew for every layer: sharing it between layers would free
        its graph in the backward of the first one that gradient checkpointing recomputes.
        """
        key = (key, torch.is_grad_enabled())
        if key in self.cache:
            return self.cache[key]
        value = compute()
        if not _requires_grad(value):
            self.cache[key] = value
        return value


def one_axis(position_ids: Tensor) -> Tensor:
    """`(batch, query_len)` from `(axes, batch, query_len)`: for text all axes of M-RoPE are equal.

    Raises:
        UnsupportedError: if they are not, as for the patches of an image.
    """
    if position_ids.dim() == 3:
        if not torch.compiler.is_compiling() and not bool((position_ids == position_ids[:1]).all()):
            raise UnsupportedError(
                f"position_ids have {position_ids.shape[0]} axes that differ (images or video); the schemes here place "
                "tokens on one axis. Unpatch the model for such inputs."
            )
        return position_ids[0]
    return position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0)


def _requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, tuple) and any(_requires_grad(item) for item in value)
