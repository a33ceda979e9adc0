"""Attention with any bias, computed a few rows of queries at a time, so that the full bias matrix is never stored."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_posenc.attention.block_attention import block_attention
from hf_posenc.attention.blockwise import SIZES, autocast_inputs, for_kernel
from hf_posenc.attention.forms import MOST_MATRICES, BiasForm, DistanceForm, RowsForm
from hf_posenc.schemes.positions import gradients_may_be_shared


def is_shared_by_layers(form: BiasForm, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether layers of an accelerator share one matrix of a fixed bias, with the mask in it, beyond short inputs."""
    if not isinstance(form, DistanceForm) or form.requires_grad or not form.of_layers:
        return False
    batch = 1 if mask is None else mask.shape[0]
    return batch * form.heads * query.shape[2] * key.shape[2] <= SIZES[query.is_cpu].shared_numbers


def attend_by_blocks(
    function: Callable[..., Any] | None, form: BiasForm, causal: bool, given: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Computes attention for one block of query rows at a time, each with its rows of the bias.

    The backward pass recomputes each block, so it also stores the bias of one block only, unless the whole bias is
    small (`Sizes.kept_numbers`).

    Args:
        function: takes `position_bias=`, as transformers' "sdpa" does, and is called for every block; `None` for plain
            attention.
        form: the bias.
        causal: whether query i sees no key after key i; without a mask, and with as many keys as queries.
        given: module, query, key, value, mask and further arguments of the function, as `attend_with_bias` gets them.
        kwargs: its further arguments by name.

    Returns:
        `(batch, query_len, heads, value_dim)`, and `None` for the probabilities.
    """
    module, query, key, value, attention_mask, *args = given
    batch, heads, query_length, _ = query.shape
    key_length = key.shape[2]
    kwargs = kwargs | {"is_causal": False}
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    def block(start: int, stop: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = stop if causal else key_length
        if stop - start < query_length or seen < key_length:
            query, key, value = query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen]
        if function is None:
            bias = _masked_rows(form, attention_mask, causal, start, stop, seen, query)
            # Additive masks may hide all keys of a padding query with -inf, for which softmax gives NaN.
            may_be_empty = attention_mask is not None and attention_mask.dtype != torch.bool
            return block_attention(query, key, value, bias, scaling, may_be_empty)
        mask = _mask_of_rows(attention_mask, causal, start, stop, seen, query.device)
        bias = form.rows(start, stop, seen).to(query.dtype)
        output: Tensor = function(module, query, key, value, mask, *args, position_bias=bias, **kwargs)[0]
        return output

    if function is None:
        query, key, value = autocast_inputs(query, key, value)
    if function is None and not query.is_cpu and is_shared_by_layers(form, query, key, attention_mask):
        return block(0, query_length, query, key, value), None
    run: Callable[..., Tensor] = block
    sizes = SIZES[query.is_cpu]
    kept = sizes.bias_numbers if function is None and not isinstance(form, RowsForm) else sizes.kept_numbers
    if torch.is_grad_enabled() and batch * heads * query_length * key_length > kept:
        preserve = bool(kwargs.get("dropout"))
        run = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=preserve)
    # Four blocks skip most of the invisible pairs.
    most = query_length / 4 if causal and query_length >= sizes.divided_length else query_length
    bounds = _bounds(query_length, key_length, causal, most, sizes.bias_numbers / (batch * heads))
    blocks = [run(start, stop, query, key, value) for start, stop in bounds]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1), None


def _bounds(query_length: int, key_length: int, causal: bool, most: float, pairs: float) -> Iterator[tuple[int, int]]:
    """The rows `[start, stop)` of each block: at most `most`, with about `pairs` visible pairs or slightly more."""
    start = 0
    while start < query_length:
        rows = (math.sqrt(start**2 + 4 * pairs) - start) / 2 if causal else pairs / key_length
        stop = min(start + math.ceil(min(rows, most)), query_length)
        yield start, stop
        start = stop


def _masked_rows(
    form: BiasForm, mask: Tensor | None, causal: bool, start: int, stop: int, seen: int, query: Tensor
) -> Tensor:
    """The rows of a bias with the smallest number at hidden pairs. Layers that share a distance bias share them."""
    key = (id(mask), causal, start, stop, seen, query.dtype, torch.is_grad_enabled())
    shared = isinstance(form, DistanceForm) and (not form.requires_grad or gradients_may_be_shared())
    if isinstance(form, DistanceForm) and shared and key in form.matrices:
        return form.matrices[key][0]
    converts = not query.is_cpu and isinstance(form, DistanceForm) and not form.requires_grad
    if isinstance(form, DistanceForm) and converts and (mask is None or mask.dtype == torch.bool):
        # Before there is a number for every pair. The sum with an additive mask may be too small for float16.
        form = dataclasses.replace(form, vector=for_kernel(form.vector, query))
    bias = form.rows(start, stop, seen)
    own = _mask_of_rows(mask, causal, start, stop, seen, bias.device)
    if own is not None:
        bias = torch.where(own, bias, torch.finfo(bias.dtype).min) if own.dtype == torch.bool else bias + own
    bias = for_kernel(bias, query) if converts else bias
    if isinstance(form, DistanceForm) and shared:
        if len(form.matrices) == MOST_MATRICES:
            form.matrices.pop(next(iter(form.matrices)))
        form.matrices[key] = bias, mask
    return bias


def _mask_of_rows(
    mask: Tensor | None, causal: bool, start: int, stop: int, seen: int, device: torch.device
) -> Tensor | None:
    if mask is not None:
        return (mask[:, :, start:stop] if mask.shape[2] > 1 else mask)[..., :seen]
    if not causal:
        return None
    rows = torch.arange(start, stop, device=device)
    return (torch.arange(seen, device=device) <= rows.unsqueeze(-1)).view(1, 1, stop - start, seen)
