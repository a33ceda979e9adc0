"""Small replacements that disable a native mechanism on one instance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def zero_bias(*args: Any, **kwargs: Any) -> Tensor:
    """Replaces a method that computes a bias: a zero `(1, 1, 1, 1)` on the device of the first tensor of a call."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else kwargs.get("device")
    dtype = tensors[0].dtype if tensors and tensors[0].is_floating_point() else torch.get_default_dtype()
    return torch.zeros(1, 1, 1, 1, device=device, dtype=kwargs.get("dtype", dtype))


def zero_bias_of(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for the forward of a module whose output is a bias: a zero `(1, 1, 1, 1)`, which fits any scores."""
    weight = next(module.parameters())
    return torch.zeros(1, 1, 1, 1, dtype=weight.dtype, device=weight.device)


def no_bias(*args: Any, **kwargs: Any) -> None:
    """Replaces a method whose result is added to the scores only if it is not `None`."""


def zero_vectors(position_ids: Tensor) -> Tensor:
    """Replaces the forward of a table: a single column of zeros `(..., 1)`, which broadcasts in the addition."""
    return torch.zeros(*position_ids.shape, 1, device=position_ids.device)


def no_vectors(hidden_states: Tensor) -> Tensor:
    """Replaces the forward of a module that makes vectors for embeddings: a zero of their dtype."""
    return hidden_states.new_zeros(())


def zero_phases(table: nn.Embedding, shape: torch.Size, cached: int = 0, position_ids: Any = None) -> Tensor:
    """Replaces the forward of a table of rotary phases: zeros `(length, width)` for tokens `(batch, length)`."""
    length = shape[1] if position_ids is None else position_ids.shape[-1]
    return table.weight.new_zeros(length, table.embedding_dim)


def zero_relative_shift(scores: Tensor, klen: int = -1) -> Tensor:
    """Replaces XLNet's `rel_shift_bnij`: the position term of the scores is zeros `(batch, heads, query_len, klen)`."""
    return scores.new_zeros(*scores.shape[:3], klen)
