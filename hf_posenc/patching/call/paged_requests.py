"""Attention over paged keys (continuous batching), computed separately for each request or group of requests.

A paged call has the new tokens of many requests in one row, and its cache returns all keys of these requests in another
row. Both rows are split into groups that look like calls of `generate`: a single prompt, or the newest tokens of
several requests as a left-padded batch. A bias therefore does not need to handle pages, and no query is multiplied with
the keys of another request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.block_attention import AttentionCall
from hf_posenc.attention.blockwise import additive_mask
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import LayerCall
from hf_posenc.patching.call.cache import heads_first
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.forwards import parameters_of

PREFIX = "paged|"
EAGER = "eager"
#: The argument that identifies calls of continuous batching.
PAGES = "read_index"
#: Arguments in which continuous batching describes the requests to an attention function.
_REQUEST_ARGUMENTS = (
    "cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k",
    "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "position_ids", "is_causal",
)  # fmt: skip


@dataclass(frozen=True)
class Requests:
    """Requests whose attention is computed together.

    Args:
        state: the positions of their tokens.
        queries: indices of their new tokens in the packed row: a slice for one request, else `(requests, 1)` int64.
        keys: indices of their keys in the packed row: a slice for one request, else `(requests, key_len)` int64.
        real: `(requests, key_len)` bool, False at the left padding of shorter requests; `None` if there is none.
        sees_all: whether no earlier key is outside the sliding window of a query.
    """

    state: ForwardState
    queries: slice | Tensor
    keys: slice | Tensor
    real: Tensor | None = None
    sees_all: bool = True

    def mask(self, implementation: str, packed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The mask of these requests, in the format of the attention function.

        Args:
            implementation: name of the attention function.
            packed: `(1, 1, all queries, all keys)`, the additive mask of the call; `None` for flash kernels.
            dtype: dtype of the logits.

        Returns:
            The mask, or `None` if every query sees all keys up to its own.
        """
        if isinstance(self.keys, slice):
            length, key_length = self.state.query_length, self.keys.stop - self.keys.start
            causal = implementation != "eager" and length == key_length and self.sees_all
            return None if packed is None or length == 1 or causal else packed[..., self.queries, self.keys]
        if self.real is None:
            return None
        if "flash" in implementation:
            return self.real.long()
        visible = self.real[:, None, None]
        return additive_mask(visible, dtype) if implementation == "eager" else visible


def read_pages(key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The keys and values of all requests of a call.

    Since transformers 5.24 the layer updates its cache itself. Before, the attention function writes the new keys to
    their pages and reads all of them.

    Args:
        key: `(1, key_value_heads, new tokens, width)`.
        value: `(1, key_value_heads, new tokens, width)`.
        layer: index of the layer.
        kwargs: arguments of the attention function; the cache may modify them.

    Returns:
        Both `(1, key_value_heads, all keys, width)`.

    Raises:
        UnsupportedError: if the kernel is to read the pages itself (`block_table`).
    """
    if kwargs.get("block_table") is not None:
        raise UnsupportedError(
            "In this call the kernel reads the pages of keys itself (block_table), but this scheme needs access to the "
            "keys. Use model.init_continuous_batching or generate_batch, or with max_blocks_per_request=0."
        )
    cache = kwargs.get("cache")
    if cache is None:
        return key, value
    if "kwargs" in parameters_of(type(cache).update):
        keys, values = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
    else:
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        keys, values = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
    return heads_first(keys), heads_first(values)


def _group(state: ForwardState, key_length: int, mask: Tensor | None, kwargs: Mapping[str, Any]) -> list[Requests]:
    """Splits the requests of a call into groups.

    Layers with a sliding window read fewer keys of a long request. They read all keys of a prompt that arrives in one
    piece, and their mask, `(1, 1, all queries, all keys)`, hides those outside the window.
    """
    query_bounds, key_bounds = kwargs["cu_seq_lens_q"].long(), kwargs["cu_seq_lens_k"]
    if isinstance(key_bounds, Mapping):
        key_bounds = next(bounds for bounds in key_bounds.values() if int(bounds[-1]) == key_length)
    key_bounds, device = key_bounds.long(), query_bounds.device
    last = query_bounds[1:] - 1
    newest = state.positions().ids[0, last]
    sees_first = torch.ones_like(newest) if mask is None else mask[0, 0, last, key_bounds[:-1]] == 0
    rows = torch.stack((query_bounds[:-1], last + 1, key_bounds[:-1], key_bounds[1:], newest, sees_first)).T.tolist()
    prompts, decoding = [], defaultdict(list)
    for row in rows:
        if row[1] == row[0]:
            continue  # This prompt has no new tokens in this call.
        if row[1] - row[0] == 1:
            # Requests whose lengths differ by less than a factor of 2 are padded to the longest.
            decoding[(row[3] - row[2]).bit_length()].append(row)
        else:
            prompts.append(_single_request(row, device))
    return prompts + [
        _single_request(some[0], device) if len(some) == 1 else _decoding_batch(some, device)
        for some in decoding.values()
    ]


def _single_request(row: list[int], device: torch.device) -> Requests:
    first_query, end_query, first_key, end_key, newest, sees_first = row
    length = end_query - first_query
    state = ForwardState(length, offset=newest + 1 - length, device=device)
    return Requests(state, slice(first_query, end_query), slice(first_key, end_key), sees_all=bool(sees_first))


def _decoding_batch(rows: list[list[int]], device: torch.device) -> Requests:
    """A left-padded batch of requests with one new token each."""
    queries, _, first, end, newest, _ = torch.tensor(rows, device=device).unsqueeze(-1).unbind(1)
    longest = max(row[3] - row[2] for row in rows)
    keys = end - longest + torch.arange(longest, device=device)
    real = keys >= first
    total = max(row[4] for row in rows) + 1
    # Right-aligned, so that counting the real tokens gives the positions even in a sliding window.
    mask = torch.arange(total, device=device) >= total - 1 - newest
    state = ForwardState(1, offset=total - 1, attention_mask=mask, device=device)
    return Requests(state, queries, keys.where(real, first), None if bool(real.all()) else real)


def cut_heads(packed: Tensor, rows: slice | Tensor) -> Tensor:
    """Selects some requests, `(requests, heads, length, width)`, from the packed row `(1, heads, tokens, width)`."""
    return packed[:, :, rows] if isinstance(rows, slice) else packed[0, :, rows].transpose(0, 1)


def attend_pages(
    attend: Callable[[LayerCall, AttentionCall, Tensor, Tensor, Tensor], Any],
    call: LayerCall,
    kernel: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Any:
    """Computes the attention of all requests in one row, whose keys were read from their pages.

    Args:
        attend: computes the attention of one or more requests as if they were a separate call.
        call: the call of the layer.
        kernel: the call of the attention function.
        query: `(1, heads, new tokens, width)`, those of all requests.
        key: `(1, key_value_heads, all keys, width)`.
        value: `(1, key_value_heads, all keys, value_dim)`.
    """
    features, mask, kwargs, length = call.key_features, kernel.mask, kernel.kwargs, key.shape[2]
    # Layers with the same mask share the groups.
    groups = call.state.shared("requests", lambda: _group(call.state, length, mask, kwargs), length, mask=mask)
    own_kwargs = {name: value for name, value in kwargs.items() if name not in _REQUEST_ARGUMENTS} | {"is_causal": True}
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for requests in groups:
        hidden_states = cut_heads(call.hidden_states.unsqueeze(1), requests.queries).squeeze(1)
        request_call = LayerCall(requests.state, hidden_states)
        request_call.key_features = None if features is None else cut_heads(features, requests.keys)
        if call.rotation is not None:
            request_call.rotation = call.rotation.each(functools.partial(cut_heads, rows=requests.queries))
        own_mask = requests.mask(kernel.name, mask, query.dtype)
        own_kernel = dataclasses.replace(kernel, mask=own_mask, kwargs=dict(own_kwargs))
        heads = cut_heads(query, requests.queries), cut_heads(key, requests.keys), cut_heads(value, requests.keys)
        output[:, requests.queries] = attend(request_call, own_kernel, *heads)[0]
    return output, None
