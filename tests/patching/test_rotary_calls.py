"""The axis of the tokens in the tensors of a rotary function, read from the function itself."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.patching.anatomy.rotary_functions import rotary_call


def rotates_behind_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """One convention: `(batch, heads, tokens, width)` with phases `(batch, tokens, width)`."""
    assert cos.dim() == 3
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin


def rotates_with_and_without_a_batch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As MiniMax-M3-VL does: without a batch, phases `(tokens, width)` meet `(tokens, heads, width)`."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    return q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin


def test_one_convention_has_one_axis() -> None:
    call = rotary_call(rotates_behind_heads)
    assert call.time_axis == 2
    assert not call.other_axes


def test_a_function_of_two_conventions_is_read_by_the_shapes_of_the_call() -> None:
    call = rotary_call(rotates_with_and_without_a_batch)
    query = torch.zeros(5, 3, 8)
    phases = torch.ones(5, 8)
    assert call.tensors((query, query, phases, phases), {})[2] == 1
    assert call.tensors((), {"q": query, "k": query, "cos": phases, "sin": phases})[2] == 1
    batched, of_batch = torch.zeros(1, 3, 5, 8), torch.ones(1, 5, 8)
    assert call.tensors((batched, batched, of_batch, of_batch), {})[2] == 2
