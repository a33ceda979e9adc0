"""Models without any position, which all others are compared with.

They run no code of `hf_posenc`. A rotation or a table is removed, not multiplied by one or filled with zeros, so a bare
model does less than any model with positions.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama


def shared_copy(model: Any) -> Any:
    """Returns a copy of a model with the same weights and separate gradients."""
    return copy.deepcopy(model, {id(weight): nn.Parameter(weight.detach()) for weight in model.parameters()})


class NoPhases(nn.Module):
    """Replaces a rotary embedding: computes no angles."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[None, None]:
        """Returns neither cosines nor sines."""
        return None, None


def _not_rotated(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return query, key


def without_rotation() -> AbstractContextManager[Any]:
    """Within this context, no Llama with stock code rotates its queries and keys in this process."""
    return mock.patch.object(modeling_llama, "apply_rotary_pos_emb", _not_rotated)


class Nothing:
    """A summand without effect. Not even a sum with zeros is computed."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        """Torch calls this for every operation on a tensor and an instance."""
        if function not in (torch.Tensor.add, torch.Tensor.__add__):
            raise NotImplementedError(f"The stock code does {function} with `Nothing`; only an addition was expected.")
        return args[0]


class AddsNothing(nn.Module):
    """Replaces a table of positions, or a layer whose output is added to its input."""

    def forward(self, states: Tensor) -> Nothing:
        """Returns a summand without effect."""
        return Nothing()


class Copied(nn.Module):
    """Replaces a projection by `times` copies of its input, side by side.

    Queries, keys and values are separate tensors, as after real projections, for only the cost of copying.
    """

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps `(batch, length, hidden)` to `(batch, length, times * hidden)`."""
        return hidden_states.clone() if self.times == 1 else torch.cat([hidden_states] * self.times, dim=-1)


def reduce_to_attention(model: Any) -> None:
    """Reduces a `LlamaModel` in place to the computation between the projections of its layers.

    Norms, the feed-forward layer and the output projection are removed, and the projections to queries, keys and values
    are replaced by copies.
    """
    for layer in model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
        layer.mlp = AddsNothing()
        attention = layer.self_attn
        attention.q_proj, attention.k_proj, attention.v_proj = Copied(), Copied(), Copied()
        attention.o_proj = nn.Identity()
    model.norm = nn.Identity()
