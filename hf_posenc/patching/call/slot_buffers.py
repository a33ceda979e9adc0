"""Extending the index buffers of BERT-style embeddings for longer inputs.

`position_ids` and `token_type_ids` are as long as the native position table and are sliced to the length of the input.
Without longer buffers, even a scheme without a table would be limited to the length of the native one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posenc.patching.find.discovery import own_modules

_BUFFERS = ("position_ids", "token_type_ids")


#: Length of the buffers in an exported program, which cannot extend them.
EXPORTED_LENGTH = 2**15


class SlotBuffers:
    """The index buffers of one stack, none of them part of its state dict."""

    def __init__(self) -> None:
        self.native_lengths: list[tuple[nn.Module, str, int]] = []
        self.shortest: int | None = None
        #: Number of rows before that of the first token in the position table; RoBERTa indexes its buffers by row.
        self.rows_before = 0

    def reach(self, stack: nn.Module, length: int) -> None:
        """Extends every buffer to at least `length` tokens; existing slots keep their values."""
        length += self.rows_before
        if self.shortest is None:
            lengths = [buffer.shape[1] for _, _, buffer in _slot_buffers(stack)]
            self.shortest = min(lengths) if lengths else 0
        if not 0 < self.shortest < length:
            return
        for module, name, buffer in _slot_buffers(stack):
            if buffer.shape[1] >= length:
                continue
            self.native_lengths.append((module, name, buffer.shape[1]))
            rows = buffer.new_zeros(1, max(length, 2 * buffer.shape[1]))
            if name == "position_ids":
                rows = buffer[:, :1] + arange_like(rows)
            module._buffers[name] = rows
        self.shortest = None

    def reach_positions(self, stack: nn.Module, position_ids: Tensor | None) -> None:
        """Same as `reach` for positions passed by the caller, because BERT indexes its token types by position."""
        if self.shortest == 0 or position_ids is None or position_ids.is_meta or torch.compiler.is_compiling():
            return
        self.reach(stack, int(position_ids.max()) + 1)

    def restore(self) -> None:
        """Restores the native length of every buffer, on its current device."""
        for module, name, length in reversed(self.native_lengths):
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = buffer[:, :length].clone()
        self.native_lengths.clear()
        self.shortest = None


def _slot_buffers(stack: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    found = []
    # The position ids of a vision tower inside a stack of text are as many as its patches.
    for module in (stack, *(module for _, module in own_modules(stack))):
        for name in _BUFFERS:
            buffer = module._buffers.get(name)
            transient = name in module._non_persistent_buffers_set
            if isinstance(buffer, Tensor) and buffer.dim() == 2 and buffer.shape[0] == 1 and transient:
                found.append((module, name, buffer))
    return found


def arange_like(rows: Tensor) -> Tensor:
    """`(1, length)`: 0, 1, 2, ... in the dtype and on the device of `rows`."""
    return rows.new_ones(rows.shape).cumsum(-1) - 1
