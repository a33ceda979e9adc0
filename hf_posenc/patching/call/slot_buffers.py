"""Extending buffers that are as long as the native position table, and are sliced to the length of the input.

They are the `position_ids` and `token_type_ids` of BERT-style embeddings, the rotary tables of GPT-J and CodeGen, which
no scheme reads, and the causal masks of GPT and GPT-Neo. Without longer buffers, even a scheme without a table would be
limited to the length of the native one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.anatomy.anatomy import modules_by_stack

_BUFFERS = ("position_ids", "token_type_ids")
#: Sines and cosines `(length, width)`.
_PHASES = "embed_positions"
#: A causal mask `(1, 1, length, length)`.
_MASK = "bias"
#: The length of a mask grows to a multiple of this, because its size is the square.
_MASK_STEP = 256
#: Length of the buffers in an exported program, which cannot extend them.
EXPORTED_LENGTH = 2**15


class SlotBuffers:
    """The buffers of one stack, none of them part of its state dict.

    Args:
        rows_before: number of rows before that of the first token in the position table; RoBERTa indexes its buffers by
            row.
    """

    def __init__(self, rows_before: int) -> None:
        self.native_lengths: list[tuple[nn.Module, str, int]] = []
        #: Measured before the first call, because a graph is made for the value that it finds.
        self.shortest: int | None = None
        self.rows_before = rows_before

    def reach(self, stack: nn.Module, length: int, *, masks: bool = True) -> None:
        """Extends every buffer to at least `length` tokens; existing slots keep their values.

        Args:
            stack: the stack.
            length: number of tokens.
            masks: whether to extend masks too.
        """
        length += self.rows_before
        if self.shortest is None:
            self.measure(stack)
        if not 0 < (self.shortest or 0) < length:
            return
        for module, name, buffer in _slot_buffers(stack):
            native = _length(name, buffer)
            if native >= length or (name == _MASK and not masks):
                continue
            self.native_lengths.append((module, name, native))
            if name == _MASK:
                module._buffers[name] = _longer_mask(module, buffer, length)
            elif name == _PHASES:
                more = buffer.new_zeros(max(length, 2 * native) - native, buffer.shape[1])
                module._buffers[name] = torch.cat([buffer, more])
            else:
                rows = buffer.new_zeros(1, max(length, 2 * native))
                module._buffers[name] = buffer[:, :1] + arange_like(rows) if name == "position_ids" else rows
        self.measure(stack)

    def measure(self, stack: nn.Module) -> None:
        """Finds the length of the shortest buffer, 0 without any."""
        self.shortest = min((_length(name, buffer) for _, name, buffer in _slot_buffers(stack)), default=0)

    def reach_positions(self, stack: nn.Module, position_ids: Tensor) -> None:
        """Same as `reach` for positions passed by the caller, by which BERT indexes its token types, but not masks."""
        if self.shortest == 0 or position_ids.is_meta or torch.compiler.is_compiling():
            return
        self.reach(stack, int(position_ids.max()) + 1, masks=False)

    def restore(self) -> None:
        """Restores the native length of every buffer, on its current device."""
        for module, name, length in reversed(self.native_lengths):
            buffer = module._buffers[name]
            assert buffer is not None
            within = buffer[:length] if name == _PHASES else buffer[..., :length]
            module._buffers[name] = (within[..., :length, :] if name == _MASK else within).clone()
        self.native_lengths.clear()
        self.shortest = None


def _slot_buffers(stack: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    found = []
    # The position ids of a vision tower inside a stack of text are as many as its patches.
    for module in (stack, *(module for _, module in modules_by_stack(stack)[0].members)):
        for name in _BUFFERS:
            buffer = module._buffers.get(name)
            transient = name in module._non_persistent_buffers_set
            if isinstance(buffer, Tensor) and buffer.dim() == 2 and buffer.shape[0] == 1 and transient:
                found.append((module, name, buffer))
        for name, dimensions in ((_PHASES, 2), (_MASK, 4)):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dim() == dimensions and name in module._non_persistent_buffers_set:
                found.append((module, name, buffer))
    return found


def _length(name: str, buffer: Tensor) -> int:
    """Number of tokens that a buffer is made for."""
    return buffer.shape[0] if name == _PHASES else buffer.shape[-1]


def _longer_mask(module: nn.Module, mask: Tensor, length: int) -> Tensor:
    """A causal mask for at least `length` tokens, with the window of a local layer of GPT-Neo."""
    length = -(-length // _MASK_STEP) * _MASK_STEP
    longer = mask.new_ones(1, 1, length, length).tril()
    config: Any = getattr(module, "config", None)
    if getattr(module, "attention_type", None) == "local":
        longer = longer ^ longer.tril(-config.window_size)
    return longer


def arange_like(rows: Tensor) -> Tensor:
    """`(1, length)`: 0, 1, 2, ... in the dtype and on the device of `rows`."""
    return rows.new_ones(rows.shape).cumsum(-1) - 1
