"""Attention of a block of queries whose bias is there in full, and is learned.

Torch's flash kernels give no gradient of a mask; asked for one, it turns to a sequence of plain operations. Here the
forward pass stays with the kernel, and the backward pass computes the probabilities again: their gradient, before
softmax, is that of the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

aten = torch.ops.aten


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """`softmax(scaling * query . key + bias) . value`.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        bias: `(batch or 1, heads, query_len, key_len)` float32.
        mask: which pairs are visible (boolean), or what is added to their logits; broadcasts to the bias.
        scaling: factor of `query . key`.

    Returns:
        `(batch, query_len, heads, value_dim)` in the dtype of the query.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    mask = None if mask is None else additive_mask(mask, bias.dtype)
    output: Tensor = _BlockAttention.apply(query, key, value, bias, mask, scaling)
    return output.transpose(1, 2)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to logits: the smallest number where a boolean mask hides a pair."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.scaling = scaling
        ctx.save_for_backward(query, key, value, bias, mask)
        masked = bias if mask is None else bias + mask
        if query.device.type != "cpu":
            # Only the CPU's kernel takes a float32 mask beside heads of another dtype.
            masked = masked.to(query.dtype)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=masked.expand(query.shape[0], -1, -1, -1), scale=scaling
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, mask = ctx.saved_tensors
        heads = query.shape[1]
        with torch.autocast(query.device.type, enabled=False):
            queries, keys, values, outputs = (
                tensor.float().flatten(0, 1) for tensor in (query.float() * ctx.scaling, key, value, gradient)
            )
            scores = torch.bmm(queries, keys.transpose(1, 2)).unflatten(0, (-1, heads)).add_(bias)
            if mask is not None:
                scores.add_(mask)
            probabilities = scores.softmax(-1).flatten(0, 1)
            of_scores = torch.bmm(outputs, values.transpose(1, 2), out=scores.flatten(0, 1))
            of_value = torch.bmm(probabilities.transpose(1, 2), outputs)
            aten._softmax_backward_data.out(of_scores, probabilities, -1, torch.float32, grad_input=of_scores)
            of_query = torch.bmm(of_scores, keys).mul_(ctx.scaling)
            of_key = torch.bmm(of_scores.transpose(1, 2), queries)
        of_bias = of_scores.unflatten(0, (-1, heads))
        if bias.shape[0] == 1:
            of_bias = of_bias.sum(0, keepdim=True)
        heads_first = (
            found.reshape(like.shape).to(like.dtype)
            for found, like in ((of_query, query), (of_key, key), (of_value, value))
        )
        return *heads_first, of_bias, None, None
