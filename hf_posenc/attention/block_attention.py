"""Attention of a block of queries with a bias that is given in full, and what the kernels of a device need.

Torch's flash kernels do not compute the gradient of a mask; torch falls back to a sequence of plain operations if one
is needed. Here the forward pass uses the kernel, and the backward pass recomputes the probabilities. The gradient of
the logits is the gradient of the bias. For a short text, the time depends on the number of operators. Keeping the
probabilities needs fewer of them.

A mask may hide all keys of a query, as for padding before a text. Its output is the mean of the values, as in eager
attention, and does not depend on the scores. A softmax gives the scores a gradient nevertheless. Torch's kernels give
one that is far too large, because they keep the logarithm of the sum of each row, which vanishes next to the number at
hidden pairs. So the kernel gets another row for such a query, and the mean of the values replaces its output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_posenc.errors import UnsupportedError

aten = torch.ops.aten
_NOTHING = nullcontext()


@dataclass(frozen=True)
class AttentionCall:
    """What layers pass to an attention function besides their queries, keys and values.

    Args:
        name: the backend's name, "eager" for the model's own function.
        function: the attention function that the model would call.
        mask: a mask in the format of the backend.
        args: further arguments of the function.
        kwargs: its further arguments by name.
    """

    name: str
    function: Callable[..., Any]
    mask: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def scaling(self, query: Tensor) -> float:
        """The factor of `query . key`."""
        scaling = self.kwargs.get("scaling")
        return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    may_be_empty: bool,
    keeps_probabilities: bool = False,
    empty: Tensor | None = None,
) -> Tensor:
    """`softmax(scaling * query . key + bias) . value`.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        bias: `(batch or 1, heads, query_len, key_len)` float32, the mask included.
        scaling: factor of `query . key`.
        may_be_empty: whether a row of the bias may be -inf.
        keeps_probabilities: whether the probabilities may be kept for the backward pass. Ignored with an additive mask,
            or if query and bias differ in dtype.
        empty: of `rows_without_keys`, whose rows of the bias `without_empty_rows` has replaced.

    Returns:
        `(batch, query_len, heads, value_dim)` in the dtype of the query.
    """
    if key.shape[1] != query.shape[1]:
        key, value = (for_each_query_head(tensor, query.shape[1]) for tensor in (key, value))
    if bias.requires_grad and torch.is_grad_enabled():
        if keeps_probabilities and not may_be_empty and query.dtype == bias.dtype:
            output = plain_attention(query, key, value, bias, scaling)
        else:
            output = cast("Tensor", _BlockAttention.apply(query, key, value, bias, scaling, may_be_empty))
    else:
        output = _forward(query, key, value, bias, scaling)
    output = output.transpose(1, 2).contiguous()  # As stock attention functions return it: some models call `view`.
    return output if empty is None else with_means(output, value, empty)


def single_query_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float | None
) -> tuple[Tensor, None]:
    """Attention of one query, as stock sdpa computes it, in fewer calls. Query heads are the queries of their key head.

    Args:
        module: the attention module, which does not matter.
        query: `(batch, heads, 1, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        bias: `(batch or 1, heads, 1, key_len)`, as the kernel of the device takes it, or `None`.
        scaling: factor of `query . key`; `None` for that of the width.

    Returns:
        `(batch, 1, heads, value_dim)`, and `None` for the probabilities.
    """
    batch, heads, _, width = query.shape
    if key.shape[1] != heads:
        query = query.reshape(batch, key.shape[1], -1, width)
        bias = None if bias is None else bias.reshape(bias.shape[0], key.shape[1], -1, bias.shape[-1])
    if scaling is not None and width != value.shape[-1] and query.is_cpu and query.dtype == torch.float32:
        # The kernel is for one width. Torch would take more operators, and copy all keys.
        output = plain_attention(query, key, value, bias, scaling)
    else:
        output = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


def rows_without_keys(mask: Tensor) -> Tensor | None:
    """`(batch or 1, heads or 1, query_len or 1, 1)` bool: queries that see no key. `None` without gradients.

    Args:
        mask: `(batch or 1, heads or 1, query_len or 1, key_len)`.
    """
    if not torch.is_grad_enabled():
        return None
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~visible.any(-1, keepdim=True)


def without_empty_rows(bias: Tensor, empty: Tensor | None) -> Tensor:
    """A bias with the mask whose rows without keys suit the kernels. A learned bias has a backward pass of its own."""
    return bias if empty is None or bias.requires_grad else bias.masked_fill(empty, 0.0)


def with_means(output: Tensor, value: Tensor, empty: Tensor) -> Tensor:
    """Attention in which queries that see no key get the mean of the values.

    Args:
        output: `(batch, query_len, heads, value_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        empty: of `rows_without_keys`.
    """
    means = for_each_query_head(value.mean(-2, keepdim=True), output.shape[2])
    return torch.where(empty.transpose(1, 2), means.transpose(1, 2), output)


def attend_with_mask(
    call: AttentionCall,
    bias: Tensor,
    mask: Tensor | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Calls the function of a call with one additive mask instead of a mask and a bias.

    Args:
        call: the call. Without a mask in it, every query sees a key.
        bias: `(batch or 1, heads, query_len, key_len)`.
        mask: `(batch or 1, heads or 1, query_len or 1, key_len)`, boolean (True = attend) or additive.
        module: the attention module.
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.

    Returns:
        `(batch, query_len, heads, value_dim)`.
    """
    empty = None if mask is None or call.mask is None else rows_without_keys(mask)
    masked = merge_mask(mask, bias, query.dtype)
    masked = masked if empty is None else masked.masked_fill(empty, 0.0)
    output: Tensor = call.function(module, query, key, value, masked, *call.args, **call.kwargs)[0]
    return output if empty is None else with_means(output, value, empty)


def merge_mask(attention_mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Combines a mask and a bias into an additive mask. Masked entries get the minimum of `dtype`, or that of float32.

    Args:
        attention_mask: boolean (True = attend) or additive, broadcastable to `(batch, heads, query_len, key_len)`.
        bias: `(1 or batch, heads, query_len, key_len)`, float32; -inf in it masks too.
        dtype: dtype of the logits.
    """
    # Models compute the softmax of float64 logits in float32, where a smaller number would be -inf and a full row NaN.
    smallest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    bias = bias.to(torch.promote_types(bias.dtype, dtype))
    if attention_mask is None:
        merged = bias
    else:
        attention_mask = attention_mask[..., : bias.shape[-1]]
        if attention_mask.dtype == torch.bool:
            merged = torch.where(attention_mask, bias, smallest)
        else:
            # A large bias must not unmask a key.
            masked = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
            merged = (attention_mask.to(bias.dtype) + bias).masked_fill(masked, smallest)
    return merged.clamp(min=smallest).to(dtype)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """`softmax(scaling * query . key + bias) . value` in plain operators, whose probabilities autograd keeps.

    All tensors have one dtype, and there are as many key heads as query heads.
    """
    batch, heads, length = query.shape[:3]
    queries, keys, values = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    of_pairs = queries if bias is None else bias.expand(batch, -1, -1, -1).flatten(0, 1)
    with without_autocast(query.device):
        if bias is None:
            scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scaling)
        else:
            scores = torch.baddbmm(of_pairs, queries, keys.transpose(1, 2), alpha=scaling)
        return torch.bmm(scores.softmax(-1), values).view(batch, heads, length, value.shape[-1])


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    # The kernel reads a mask of another shape element by element.
    masked = for_kernel(bias, query).expand(query.shape[0], -1, -1, -1)
    # Autocast would round the bias.
    with without_autocast(query.device):
        return scaled_dot_product_attention(query, key, value, attn_mask=masked, scale=scaling)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, may_be_empty: bool
    ) -> Tensor:
        ctx.scaling, ctx.may_be_empty = scaling, may_be_empty
        ctx.save_for_backward(query, key, value, bias)
        return _forward(query, key, value, bias.detach(), scaling)  # The kernel refuses a mask with gradients.

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        query, key, value, bias = ctx.saved_tensors
        heads, dtype = query.shape[1], torch.promote_types(query.dtype, torch.float32)
        with without_autocast(query.device):
            queries, keys, values, outputs = (each.to(dtype).flatten(0, 1) for each in (query, key, value, gradient))
            of_pairs = bias.to(dtype).expand(query.shape[0], -1, -1, -1).flatten(0, 1)
            scores = torch.baddbmm(of_pairs, queries, keys.transpose(1, 2), alpha=ctx.scaling)
            probabilities = scores.softmax(-1)
            if ctx.may_be_empty:
                probabilities.nan_to_num_(0.0)
            of_scores = torch.bmm(outputs, values.transpose(1, 2), out=scores)
            of_value = torch.bmm(probabilities.transpose(1, 2), outputs)
            aten._softmax_backward_data.out(of_scores, probabilities, -1, dtype, grad_input=of_scores)
            of_query = torch.baddbmm(queries, of_scores, keys, beta=0, alpha=ctx.scaling)
            of_key = torch.baddbmm(keys, of_scores.transpose(1, 2), queries, beta=0, alpha=ctx.scaling)
        of_bias = torch.unflatten(of_scores, 0, (-1, heads)).to(bias.dtype)
        if bias.shape[0] != query.shape[0]:
            of_bias = of_bias.sum(0, keepdim=True)
        pairs = ((of_query, query), (of_key, key), (of_value, value))
        heads_first = (of_heads.reshape(like.shape).to(like.dtype) for of_heads, like in pairs)
        return *heads_first, of_bias, None, None


def for_kernel(bias: Tensor, query: Tensor) -> Tensor:
    """Converts a float32 bias to the dtype that the device's kernel needs.

    The CPU's kernel accepts a float32 bias with narrower dtypes. With a float64 query it would misread it. Other
    devices have kernels for contiguous rows only.
    """
    if query.dtype == torch.float64:
        return bias.double()
    if query.device.type == "cpu":
        return bias
    if bias.dtype != query.dtype:
        bias = bias.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def for_each_query_head(tensor: Tensor, heads: int) -> Tensor:
    """`(batch, heads, key_len, width)` from `(batch, key_value_heads, key_len, width)`."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts queries, keys and values to the dtype of attention under autocast, which does not change float64."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disables autocast only if it is enabled, because torch's context manager costs as much as an operator."""
    if not torch._C._is_any_autocast_enabled() or device.type == "meta":
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def refuse_second_derivative(*_: object) -> None:
    """Raises an error in the second of two backward passes.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "Like flash kernels, fused attention with a position bias does not support second derivatives. For gradient "
        'penalties and similar methods, use model.set_attn_implementation("eager").'
    )
