"""Index buffers that BERT-style embeddings size to their table, made long enough for longer inputs.

`position_ids` and `token_type_ids` are sliced to the input's length, so without this a scheme that has no table could
still not go past the length of the one it replaced.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_BUFFERS = ("position_ids", "token_type_ids")


def longest_slot(stack: nn.Module) -> int | None:
    """The shortest index buffer of a stack, in slots; `None` where it has none."""
    lengths = [buffer.shape[1] for _, _, buffer in _slot_buffers(stack)]
    return min(lengths, default=None)


def extend_slot_buffers(stack: nn.Module, length: int) -> None:
    """Makes the index buffers of a stack at least `length` long.

    The first slots keep their values, so a stock model does not notice; the buffers are not part of the state dict.
    """
    for module, name, buffer in _slot_buffers(stack):
        if buffer.shape[1] >= length:
            continue
        rows = max(length, 2 * buffer.shape[1])
        if name == "position_ids":
            extended = buffer[:, :1] + _arange_like(buffer, rows)
        else:
            extended = buffer.new_zeros(1, rows)
        module._buffers[name] = extended


def _slot_buffers(stack: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    found = []
    for module in stack.modules():
        for name in _BUFFERS:
            buffer: Any = module._buffers.get(name)
            transient = name in module._non_persistent_buffers_set
            if isinstance(buffer, Tensor) and buffer.dim() == 2 and buffer.shape[0] == 1 and transient:
                found.append((module, name, buffer))
    return found


def _arange_like(buffer: Tensor, rows: int) -> Tensor:
    return buffer.new_ones(1, rows).cumsum(-1) - 1
