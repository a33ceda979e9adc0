"""How a bias reaches each attention back-end.

Every function takes what the model passes to its attention function and the bias to add, and calls the function the
model had chosen: kernels, soft caps, attention sinks and dropout stay the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError


def attend_with_bias(
    implementation: str | None,
    function: Callable[..., Any],
    bias: Tensor,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `function` so that `bias` is added to its logits.

    Args:
        implementation: the back-end's name, `None` or "eager" for the model's own function.
        function: the attention function the model would have called.
        bias: `(1 or batch, heads, query_len, key_len)` float32.
        module: the attention module.
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, head_dim)`.
        attention_mask: whatever the back-end takes as a mask.
        *args: further arguments of the function.
        **kwargs: further arguments of the function.

    Raises:
        UnsupportedError: for a back-end that cannot take a bias.
    """
    name = implementation or "eager"
    if "paged" in name or kwargs.get("cache") is not None:
        raise UnsupportedError(
            f"The attention back-end {name!r} keeps its keys in pages and never shows all of them to the attention "
            "function, so a logit bias cannot be placed. Use generate() without continuous batching."
        )
    if "flash" in name:
        raise UnsupportedError(
            f"The attention back-end {name!r} takes no logit bias and would drop it silently. Use "
            'model.set_attn_implementation("sdpa"), "flex_attention" or "eager".'
        )
    if name == "eager":
        merged = merge_mask(attention_mask, bias, query.dtype)
        return function(module, query, key, value, merged, *args, **kwargs)
    if "position_bias" not in inspect.signature(function).parameters:
        raise UnsupportedError(
            f"The attention back-end {name!r} has no position_bias parameter, so a logit bias would be lost. Use "
            'model.set_attn_implementation("sdpa"), "flex_attention" or "eager".'
        )
    if name == "flex_attention":
        # Its score function indexes the bias by batch, so a shared one has to look like one per batch item.
        bias = bias.expand(query.shape[0], -1, -1, -1)
    return function(module, query, key, value, attention_mask, *args, position_bias=bias.to(query.dtype), **kwargs)


def merge_mask(attention_mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in `dtype` that carries both; masked entries stay at the smallest finite value.

    Args:
        attention_mask: boolean (True = attend) or additive, broadcastable to `(batch, heads, query_len, key_len)`.
        bias: `(1 or batch, heads, query_len, key_len)`, float32; -inf in it masks too.
        dtype: of the logits.
    """
    smallest = torch.finfo(dtype).min
    if attention_mask is None:
        merged = bias
    else:
        attention_mask = attention_mask[..., : bias.shape[-1]]
        if attention_mask.dtype == torch.bool:
            merged = torch.where(attention_mask, bias, smallest)
        else:
            # A large bias must not bring a masked key back.
            masked = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
            merged = (attention_mask.to(bias.dtype) + bias).masked_fill(masked, smallest)
    return merged.clamp(min=smallest).to(dtype)
