"""How a bias reaches each attention back-end.

Every function takes what the model passes to its attention function and the bias to add, and calls the function the
model had chosen: kernels, soft caps, attention sinks and dropout stay the model's own. What is known of the bias
decides the rest (`hf_posenc.attention.forms`):

===============  ===========================  ==========================  =====================  =================
form             sdpa                         flex_attention              flash                  eager, others
===============  ===========================  ==========================  =====================  =================
distance         a strided view, no matrix    a look-up per pair          folded where linear    a matrix
separable        folded into queries, keys    a look-up per pair          folded                 a matrix
rows             a matrix, in blocks          a matrix                    refused                a matrix
===============  ===========================  ==========================  =====================  =================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.by_blocks import attend_by_blocks
from hf_posenc.attention.distance_attention import distance_attention
from hf_posenc.attention.folding import attend_with_wide_values, fold
from hf_posenc.attention.forms import BiasForm, DistanceForm, RowsForm, SeparableForm
from hf_posenc.attention.lookups import look_up
from hf_posenc.errors import UnsupportedError

#: The largest bias of all pairs, in bytes, that is built for a back-end that cannot do without. Set it to allow more.
DENSE_LIMIT = 8 * 2**30


def attend_with_bias(
    implementation: str | None,
    function: Callable[..., Any],
    form: BiasForm,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `function` so that a bias is added to its logits.

    Args:
        implementation: the back-end's name, `None` or "eager" for the model's own function.
        function: the attention function the model would have called.
        form: the bias.
        module: the attention module.
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, head_dim)`.
        attention_mask: whatever the back-end takes as a mask.
        *args: further arguments of the function.
        **kwargs: further arguments of the function.

    Raises:
        UnsupportedError: for a back-end that cannot take the bias, or only as a matrix that is too large.
    """
    name = implementation or "eager"
    given = (module, query, key, value, attention_mask, *args)
    if "paged" in name or kwargs.get("cache") is not None:
        raise UnsupportedError(
            f"The attention back-end {name!r} keeps its keys in pages and never shows all of them to the attention "
            "function, so a logit bias cannot be placed. Use generate() without continuous batching."
        )
    if "flash" in name:
        return _attend_folded(name, function, form, *given, **kwargs)
    if name == "eager":
        merged = merge_mask(attention_mask, form.dense(), query.dtype)
        return function(module, query, key, value, merged, *args, **kwargs)
    if "position_bias" not in inspect.signature(function).parameters:
        raise UnsupportedError(
            f"The attention back-end {name!r} has no position_bias parameter, so a logit bias would be lost. Use "
            'model.set_attn_implementation("sdpa"), "flex_attention" or "eager".'
        )
    if name == "flex_attention" and not isinstance(form, RowsForm):
        return function(*given, position_bias=look_up(form), **kwargs)
    if _is_stock_sdpa(function):
        return _attend_sdpa(function, form, *given, **kwargs)
    return _attend_dense(name, function, form, *given, **kwargs)


def _is_stock_sdpa(function: Callable[..., Any]) -> bool:
    # A function that somebody registered under this name may do anything.
    return getattr(function, "__module__", "") == "transformers.integrations.sdpa_attention"


def _attend_sdpa(
    function: Callable[..., Any],
    form: BiasForm,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = (module, query, key, value, attention_mask, *args)
    if query.shape[2] == 1:
        # A single row, which is small, and for which transformers reads shared keys once.
        return _attend_dense("sdpa", function, form, *given, **kwargs)
    causal = attention_mask is None and _is_causal(module, kwargs)
    if isinstance(form, SeparableForm) or (isinstance(form, DistanceForm) and query.device.type != "cpu"):
        separable = form if isinstance(form, SeparableForm) else _separable(form, module, kwargs)
        if separable is not None:
            return _attend_separable(function, separable, *given, **kwargs)
    plain = not args and not kwargs.get("dropout") and kwargs.get("softcap") is None
    if isinstance(form, DistanceForm) and plain:
        if causal and key.shape[2] > query.shape[2]:
            # A static cache before anything else is in it: the slots behind the queries are empty.
            key, value = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
            form = form.of_first_keys(query.shape[2])
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return distance_attention(query, key, value, form.vector, attention_mask, scaling, causal), None
    if causal and key.shape[2] != query.shape[2]:
        return _attend_dense("sdpa", function, form, *given, **kwargs)
    if torch.compiler.is_compiling():
        return _attend_dense("sdpa", function, form, *given, **kwargs)
    return attend_by_blocks(function, form, causal, plain, *given, **kwargs)


def _attend_separable(
    function: Callable[..., Any],
    form: SeparableForm,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    scaling = kwargs.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key = fold(query, key, form.terms, form.query_slots, scaling)
    return attend_with_wide_values(
        function, module, query, key, value, attention_mask, *args, scaling=scaling, **kwargs
    )


def _attend_folded(
    name: str, function: Callable[..., Any], form: BiasForm, module: torch.nn.Module, *given: Any, **kwargs: Any
) -> Any:
    separable = _separable(form, module, kwargs) if isinstance(form, DistanceForm) else form
    if not isinstance(separable, SeparableForm):
        raise UnsupportedError(
            f"The attention back-end {name!r} takes no logit bias, and this one is not a number per key that could be "
            'folded into its queries and keys. Use model.set_attn_implementation("sdpa"), "flex_attention" or "eager".'
        )
    return _attend_separable(function, separable, module, *given, **kwargs)


def _separable(form: DistanceForm, module: torch.nn.Module, kwargs: dict[str, Any]) -> SeparableForm | None:
    """A number per key says the same only where no query sees a later key."""
    return form.separable() if _is_causal(module, kwargs) else None


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _attend_dense(
    name: str,
    function: Callable[..., Any],
    form: BiasForm,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    pairs = query.shape[2] * key.shape[2]
    size = 4 * query.shape[0] * form.heads * pairs
    if not torch.compiler.is_compiling() and size > DENSE_LIMIT:
        raise UnsupportedError(
            f"Through the attention back-end {name!r} this bias is a matrix of {query.shape[2]} x {key.shape[2]} for "
            f"each of {form.heads} heads and {query.shape[0]} rows, {size / 2**30:.0f} GiB in every layer. Use "
            'model.set_attn_implementation("sdpa"), which computes it in blocks, or allow more with '
            "hf_posenc.attention.backends.DENSE_LIMIT."
        )
    bias = form.dense().to(query.dtype)
    if name == "flex_attention":
        # Its score function indexes the bias by batch, so a shared one has to look like one per batch item.
        bias = bias.expand(query.shape[0], -1, -1, -1)
    return function(module, query, key, value, *args, position_bias=bias, **kwargs)


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
