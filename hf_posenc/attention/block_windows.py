"""Block masks of flex attention for decaying biases, without blocks of keys that cannot change a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from hf_posenc.attention.forms import FusedForm
from hf_posenc.attention.windows import Call, Windows, every_window_of, is_long_enough

#: Factor by which the gradient of one query may exceed the others before the gradient of a key loses precision. The
#: block mask is also used in the backward pass, and is created before gradients are known.
_GRADIENT_MARGIN = 2.0**10


def narrowed(mask: Any, form: FusedForm, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Any:
    """Removes blocks that cannot change a result from a block mask. If they are unknown, returns the mask.

    No values are read on the host, so there is no device synchronization, and no branch in a compiled graph.

    Args:
        mask: the model's mask for flex attention.
        form: the bias; no soft cap is applied before it.
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        scaling: factor of `query . key`.
    """
    if not isinstance(mask, BlockMask) or not is_long_enough(query, key):
        return mask
    if mask.kv_num_blocks.shape[-1] != -(-query.shape[2] // mask.BLOCK_SIZE[0]):
        return mask
    share = torch.finfo(query.dtype).eps / 4
    if torch.is_grad_enabled():
        share /= _GRADIENT_MARGIN
    call = Call(query, key, value, _sees_itself(mask, query, key.shape[2]), scaling, False, share)
    terms = None if form.terms is None else form.terms.expand(query.shape[0], -1, -1)
    return _intersection(mask, every_window_of(call, form.vector, terms))


def _sees_itself(mask: BlockMask, query: Tensor, key_length: int) -> Tensor:
    """Returns whether each query sees its own key, `(batch, heads, query_len)`. Queries own the last keys."""
    batch, heads, query_length, _ = query.shape

    def at_own_key(item: Tensor, head: Tensor, row: Tensor) -> Tensor:
        return mask.mask_mod(item, head, row, row + key_length - query_length)

    of_rows = torch.vmap(at_own_key, in_dims=(None, None, 0))
    of_heads = torch.vmap(of_rows, in_dims=(None, 0, None))
    of_items = torch.vmap(of_heads, in_dims=(0, None, None))
    return of_items(*(torch.arange(count, device=query.device) for count in (batch, heads, query_length)))


def _intersection(mask: BlockMask, windows: Windows) -> BlockMask:
    rows, keys = mask.BLOCK_SIZE
    missing = -windows.first.shape[-1] % rows
    first = torch.unflatten(pad(windows.first, (0, missing), value=windows.key_length), -1, (-1, rows)).amin(-1) // keys
    last = torch.unflatten(pad(windows.last, (0, missing), value=-1), -1, (-1, rows)).amax(-1) // keys

    def within(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        kept = listed & (indices >= first.unsqueeze(-1)) & (indices <= last.unsqueeze(-1))
        order = (~kept).to(torch.int8).argsort(dim=-1, stable=True)
        in_both = indices.expand_as(kept).gather(-1, order)
        return kept.sum(-1).to(counts.dtype), in_both.contiguous()

    full: tuple[Tensor | None, Tensor | None] = (None, None)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = within(mask.full_kv_num_blocks, mask.full_kv_indices)
    return BlockMask.from_kv_blocks(
        *within(mask.kv_num_blocks, mask.kv_indices),
        *full,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )
