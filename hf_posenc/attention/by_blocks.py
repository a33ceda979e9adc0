"""Attention with any bias, computed a few rows of queries at a time, so that the full bias matrix is never stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_posenc.attention.block_attention import (
    AttentionCall,
    attend_with_mask,
    autocast_inputs,
    block_attention,
    rows_without_keys,
)
from hf_posenc.attention.blockwise import SIZES
from hf_posenc.attention.forms import MOST_MATRICES, BiasForm, RowsForm, has_shared_rows, mask_of_rows, masked_rows


def attention_by_blocks(
    call: AttentionCall, form: BiasForm, causal: bool, query: Tensor, key: Tensor, *, plain: bool
) -> Callable[[nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, None]]:
    """Attention for one block of query rows at a time, each with its rows of the bias.

    The backward pass recomputes each block, so it also stores the bias of one block only, unless the whole bias is
    small (`Sizes.kept_numbers`).

    Args:
        call: its function takes `position_bias=`, as transformers' "sdpa" does, and is called for every block.
        form: the bias.
        causal: whether query i sees no key after key i; without a mask, and with as many keys as queries.
        query: `(batch, heads, query_len, head_dim)`. Only its shape, dtype and device matter.
        key: `(batch, key_value_heads, key_len, head_dim)`, the keys that queries see. Only its shape matters.
        plain: whether to compute plain attention instead of calling the function.

    Returns:
        A function `(module, query, key, value)`. Its results are `(batch, query_len, heads, value_dim)`, and `None` for
        the probabilities.
    """
    batch, heads, query_length, _ = query.shape
    key_length = key.shape[2]
    mask, scaling, call = call.mask, call.scaling(query), replace(call, kwargs=call.kwargs | {"is_causal": False})
    # Additive masks may hide all keys of a padding query with -inf, for which softmax gives NaN.
    may_be_empty = mask is not None and mask.dtype != torch.bool
    #: Rows of a distance bias with their mask, by the first of them. Layers share them.
    known: dict[int, Tensor] = {}

    def block(start: int, stop: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = stop if causal else key_length
        if stop - start < query_length or seen < key_length:
            query, key, value = query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen]
        bias = known.get(start)
        masked = bias is None or mask is not None
        rows_mask = mask_of_rows(mask, causal, start, stop, seen, query.device) if masked else None
        if not plain:
            return attend_with_mask(call, form.rows(start, stop, seen), rows_mask, module, query, key, value)
        empty = None if mask is None or rows_mask is None else rows_without_keys(rows_mask)
        if bias is None:
            bias = masked_rows(form, rows_mask, empty, start, stop, seen, query)
            if has_shared_rows(form) and len(known) < MOST_MATRICES:
                known[start] = bias
        return block_attention(query, key, value, bias, scaling, may_be_empty, empty=empty)

    sizes = SIZES[query.is_cpu]
    # Four blocks skip most of the invisible pairs.
    most = query_length / 4 if causal and query_length >= sizes.divided_length else query_length
    bounds = [*_bounds(query_length, key_length, causal, most, sizes.bias_numbers / (batch * heads))]
    kept = sizes.bias_numbers if plain and not isinstance(form, RowsForm) else sizes.kept_numbers
    run: Callable[..., Tensor] = block
    if torch.is_grad_enabled() and batch * heads * query_length * key_length > kept:
        preserve = bool(call.kwargs.get("dropout"))
        run = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=preserve)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        if plain:
            query, key, value = autocast_inputs(query, key, value)
        blocks = [run(start, stop, module, query, key, value) for start, stop in bounds]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1), None

    return attention


def _bounds(query_length: int, key_length: int, causal: bool, most: float, pairs: float) -> Iterator[tuple[int, int]]:
    """The rows `[start, stop)` of each block: at most `most`, with about `pairs` visible pairs or slightly more."""
    start = 0
    while start < query_length:
        rows = (math.sqrt(start**2 + 4 * pairs) - start) / 2 if causal else pairs / key_length
        stop = min(start + math.ceil(min(rows, most)), query_length)
        yield start, stop
        start = stop
