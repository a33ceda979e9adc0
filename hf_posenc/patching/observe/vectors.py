"""The vectors of tokens that go into and come out of modules of a stack, and what attention makes of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.find.sites import Stack

#: Tolerance for a different order of summation, in units of the dtype's precision.
_ROUNDING, _HALF_ROUNDING = 16.0, 4.0


def tokens_of(stack: Stack, values: Any) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor of vectors among arguments or outputs, and a view of it, `(batch, length, hidden)`.

    Images and windows of sound may be packed in one row, and patches may have rows and columns on axes of their own.
    """
    values = (values,) if isinstance(values, Tensor) else values.values() if isinstance(values, dict) else values
    tensors = [value for value in values if isinstance(value, Tensor)]
    axes: tuple[int, ...] = (2, 3, 4) if stack.grid is not None else (2, 3)
    if stack.grid is None and stack.series is None:
        # Hidden states come first. Of another shape, they are those of several streams.
        tensors, axes = tensors[:1], (3,)
    found = next((tensor for tensor in tensors if tensor.dim() in axes), None)
    if found is None:
        return None, None
    tokens = found
    if tokens.dim() == 2:
        tokens = tokens.unsqueeze(0)
    elif tokens.dim() == 4:
        channels_first = tokens.shape[1] == stack.hidden_size != tokens.shape[3]
        tokens = (tokens.movedim(1, 3) if channels_first else tokens).flatten(1, 2)
    if stack.architecture.channels_first:
        tokens = tokens.transpose(1, 2)
    return found, tokens.transpose(0, 1) if stack.architecture.time_major else tokens


def exchanged(found: Tensor, other: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with another tensor in place of one of them."""
    return (
        tuple(other if value is found else value for value in args),
        {name: other if value is found else value for name, value in kwargs.items()},
    )


@contextmanager
def embedded(stack: Stack) -> Iterator[list[Tensor]]:
    """Records the input of the first layer, `(batch, length, hidden)`, of each call in a `with` block."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = tokens_of(stack, (*args, *kwargs.values()))[1]
        if tokens is not None:
            seen.append(tokens.detach())

    if stack.first_layer is None:
        yield seen
        return
    handle = stack.first_layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def attended_twice(stack: Stack, chosen: Callable[[int], list[int]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Runs the first attention module of a stack once more in every call in a `with` block, with other vectors.

    Args:
        stack: the stack.
        chosen: the places of the vectors that the tokens have instead of their own, for a number of tokens.

    Yields:
        For each call, the outputs with the other vectors and with the own ones, `(batch, length, hidden)`.
    """
    before: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def run_again(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        before.clear()
        found, tokens = tokens_of(stack, (*args, *kwargs.values()))
        if found is None or tokens is None:
            return
        other = found.clone(memory_format=torch.contiguous_format)
        changed = tokens_of(stack, other)[1]
        assert changed is not None
        changed.copy_(tokens[:, chosen(tokens.shape[1])])
        args, kwargs = exchanged(found, other, args, kwargs)
        result = tokens_of(stack, module.forward(*args, **kwargs))[1]
        before.extend(() if result is None else (result,))

    def note(module: nn.Module, args: Any, output: Any) -> None:
        result = tokens_of(stack, output)[1]
        if before and result is not None:
            seen.append((before[0], result))

    attention = stack.attentions[0].module
    handles = [
        attention.register_forward_pre_hook(run_again, with_kwargs=True),
        attention.register_forward_hook(note),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def distance(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; 0 if it is within rounding error or NaN."""
    rounding = _ROUNDING if torch.finfo(one.dtype).bits >= 32 else _HALF_ROUNDING
    allowed = rounding * torch.finfo(one.dtype).eps * float(one.abs().max())
    difference = float((one.float() - other.float()).abs().max())
    return difference if difference > allowed else 0.0
