"""Bounds on the keys that can change the result of each query under a decaying bias.

For query i, the logit of its own key, `l_ii`, is a lower bound of the row's largest logit. An upper bound of the logit
of key j is `scaling * |q_i| * max |k| + bias_ij`, so the total weight of all keys up to key j is at most `exp(scaling *
|q_i| * max |k| + logsumexp(bias_i0 ... bias_ij) - l_ii)` of the row. If that is less than a quarter of a rounding step
of the result, these keys are skipped. Adaptive Computation Pruning (arXiv:2504.06949, section 3) does the same for
forget gates. Here it applies to every decaying bias, because only the bias is needed.

Gradients are bounded in the same way: the omitted part is small relative to the gradient of a whole tensor. If the
gradient of a key is much smaller than most others, because nearby queries hardly affect the loss, it may lose precision
from omitted distant queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

#: With fewer keys, computing the bounds costs about as much as it saves (measured on two cores of an AMD EPYC).
SHORTEST = 2048
#: First and last keys are rounded outwards to multiples of this, the tile of torch's CPU kernel.
_TILE = 64


@dataclass(frozen=True)
class Windows:
    """The range of keys that can change the result of each query.

    Args:
        first: `(batch, heads, query_len)` int64, the first key of each query.
        last: `(batch, heads, query_len)` int64, the last key of each query.
        key_length: number of keys.
    """

    first: Tensor
    last: Tensor
    key_length: int

    def of_rows(self, item: int, start: int, stop: int) -> Iterator[tuple[slice, int, int]]:
        """Yields groups of adjacent heads with the range of keys that the queries `[start, stop)` need."""
        firsts = self.first[item, :, start:stop].amin(-1) // _TILE * _TILE
        ends = -((self.last[item, :, start:stop].amax(-1) + 1) // -_TILE) * _TILE
        bounds = torch.stack((firsts, ends.clamp(max=self.key_length)), -1).tolist()
        begin = 0
        for (first, end), equal in groupby(bounds):
            heads = slice(begin, begin + len(list(equal)))
            yield heads, first, end
            begin = heads.stop

    def unneeded(self, distances: Tensor) -> Tensor:
        """`(heads, count)`: whether no query needs a key at each of the given distances `(count,)`."""
        query_length = self.first.shape[-1]
        own_key = torch.arange(self.key_length - query_length, self.key_length, device=self.first.device)
        behind, ahead = (self.first - own_key).amin((0, 2)), (self.last - own_key).amax((0, 2))
        return (distances < behind.unsqueeze(-1)) | (distances > ahead.unsqueeze(-1))


@dataclass(frozen=True)
class Call:
    """The inputs of the bounds of an attention call.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`. The last `query_len` of them are the queries' own keys.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        sees_itself: boolean, broadcasts to `(batch, heads, query_len)`: which queries see their own key; `None`: all.
        scaling: factor of `query . key`.
        causal: whether query i does not see later keys.
        share: the share of a row's weight that may be omitted. A quarter of a rounding step leaves a margin for
            rounding of the bounds.
        gradient: gradient of the result, `(batch, query_len, heads, value_dim)`, if gradients must not change either.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sees_itself: Tensor | None
    scaling: float
    causal: bool
    share: float
    gradient: Tensor | None = None

    @property
    def own_keys(self) -> Tensor:
        """`(query_len,)` int64, the own key of each query."""
        return torch.arange(self.key.shape[2] - self.query.shape[2], self.key.shape[2], device=self.key.device)


def is_long_enough(query: Tensor, key: Tensor) -> bool:
    """Whether a call is long enough, and its queries have their own keys."""
    return key.shape[2] >= max(SHORTEST, query.shape[2]) and query.shape[2] > 1


def windows_of(
    heads: Sequence[Tensor],
    vector: Tensor | None,
    terms: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    gradient: Tensor | None = None,
    learned: bool = False,
) -> Windows | None:
    """Returns the windows of a bias in a call of a CPU kernel.

    Args:
        heads: queries, keys and values, as in `Call`.
        vector: `(heads, query_len + key_len - 1)`, the bias by rising distance, or `None`.
        terms: `(batch, heads, key_len)` float32, a number per key, of which each query subtracts its own, or `None`.
        mask: `(batch or 1, 1 or heads, query_len or 1, key_len)`, or `None`.
        scaling: as in `Call`.
        causal: as in `Call`.
        gradient: as in `Call`.
        learned: whether the gradient of the bias is needed. It is summed in float32 for any dtype of the heads.

    Returns:
        `None` if all keys are needed, if windows are not worthwhile, or if the mask is additive.
    """
    query, key, value = heads
    # Reading the bounds from an accelerator would synchronise it in every layer.
    if query.device.type != "cpu" or not is_long_enough(query, key) or (mask is not None and mask.dtype != torch.bool):
        return None
    sees_itself = None
    if mask is not None:
        of_queries = mask[..., key.shape[2] - query.shape[2] :]
        sees_itself = of_queries.diagonal(0, -2, -1) if mask.shape[2] > 1 else of_queries[:, :, 0]
    dtypes = (query.dtype, torch.float32) if learned else (query.dtype,)
    share = min(torch.finfo(dtype).eps for dtype in dtypes) / 4
    call = Call(query, key, value, sees_itself, scaling, causal, share, gradient)
    if terms is not None:
        sides = [terms.detach() + _largest_difference(vector, call).unsqueeze(-1)]
        own_term = terms.detach()[..., -1:]
    else:
        assert vector is not None
        center = key.shape[2] - 1
        behind, ahead = vector.detach()[:, : center + 1], vector.detach()[:, center:].flip(-1)
        sides, own_term = [behind] if causal else [behind, ahead], behind[:, -1:]
    # The bias of the farthest key is a lower bound for every bound of its weight.
    if not any(bool((side[..., :1] - own_term < math.log(call.share)).any()) for side in sides):
        return None
    return every_window_of(call, vector, terms)


def every_window_of(call: Call, vector: Tensor | None, terms: Tensor | None) -> Windows:
    """Like `windows_of`, but without reading values on the host, which would synchronise an accelerator."""
    if terms is not None:
        return _windows_of_terms(call, terms.detach(), _largest_difference(vector, call))
    assert vector is not None
    return _windows_of_distance(call, vector.detach())


def _windows_of_distance(call: Call, vector: Tensor) -> Windows:
    query_length, key_length = call.query.shape[2], call.key.shape[2]
    query_slot = key_length - 1
    needed = _needed_sum(call).to(vector.dtype) + vector[:, query_slot].view(1, -1, 1)
    rows = torch.arange(query_length, device=vector.device)
    behind = _first_needed_key(vector[:, : query_slot + 1].unsqueeze(0), needed)
    first = (behind - query_length + 1 + rows).clamp(min=0).minimum(call.own_keys)
    if call.causal:
        return Windows(first, call.own_keys.expand_as(first), key_length)
    ahead = _first_needed_key(vector[:, query_slot:].flip(-1).unsqueeze(0), needed)
    last = (key_length - 1 - ahead + rows).clamp(max=key_length - 1).maximum(call.own_keys)
    return Windows(first, last, key_length)


def _windows_of_terms(call: Call, terms: Tensor, most: Tensor) -> Windows:
    of_queries = terms[..., call.key.shape[2] - call.query.shape[2] :]
    needed = _needed_sum(call).to(terms.dtype) + of_queries - most.unsqueeze(-1)
    first = _first_needed_key(terms, needed).minimum(call.own_keys)
    last = call.own_keys if call.causal else call.own_keys.new_tensor(call.key.shape[2] - 1)
    return Windows(first, last.expand_as(first), call.key.shape[2])


def _largest_difference(vector: Tensor | None, call: Call) -> Tensor:
    """Returns the maximum of a distance bias over all keys, minus its value for the query's own key, `(1, heads)`."""
    if vector is None:
        return call.query.new_zeros(1, call.query.shape[1], dtype=torch.float32)
    query_slot = call.key.shape[2] - 1
    seen = vector.detach()[:, : query_slot + 1 if call.causal else None]
    # If it is not finite, all keys are needed.
    return (seen.amax(-1) - seen[:, query_slot]).nan_to_num(nan=torch.inf).unsqueeze(0)


def _needed_sum(call: Call) -> Tensor:
    """Returns the log-sum-exp that the biases of the first keys must reach, relative to the own key's bias.

    `(batch, heads, query_len)` float32.
    """
    query, key = call.query, call.key
    query_slots = slice(key.shape[2] - query.shape[2], None)
    heads = torch.unflatten(query.detach().float(), 1, (key.shape[1], -1))
    keys, values = (tensor.detach().float().unsqueeze(2) for tensor in (key, call.value))
    lengths, sizes = keys.norm(dim=-1), values.norm(dim=-1)
    longest, largest = lengths.amax(-1, keepdim=True), sizes.amax(-1, keepdim=True)
    own_logit = call.scaling * torch.linalg.vecdot(heads, keys[..., query_slots, :])
    # The omitted part must be small relative to the own key's contribution, even if a distant value is much larger.
    needed = own_logit - abs(call.scaling) * longest * heads.norm(dim=-1) + (sizes[..., query_slots] / largest).log()
    if call.gradient is not None:
        needed += (lengths[..., query_slots] / longest).log()
    needed = needed.flatten(1, 2) + math.log(call.share)
    if call.gradient is not None:
        # The gradient of a key is a sum over queries, one of which may have a much larger gradient than most.
        logs = call.gradient.detach().float().norm(dim=-1).transpose(1, 2).log()
        typical = logs[logs > -torch.inf].mean()
        needed -= (logs - typical).clamp(min=0)
    if call.sees_itself is not None:
        needed = needed.masked_fill(~call.sees_itself, -torch.inf)
    # A query whose bound is NaN or infinite gets all keys.
    return needed.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def _first_needed_key(bias: Tensor, needed: Tensor) -> Tensor:
    """Returns the first key with which the bias reaches the needed sum, `(batch, heads, query_len)` int64.

    Args:
        bias: `(batch or 1, heads, keys)`, the farthest key first.
        needed: `(batch, heads, query_len)`.
    """
    sums = bias.logcumsumexp(-1)
    # One NaN makes every later sum NaN. Then all keys are needed.
    usable = sums[..., -1:].isfinite()
    sums, needed = torch.where(usable, sums, 0.0), torch.where(usable, needed, -torch.inf)
    if bias.shape[0] == needed.shape[0]:
        return torch.searchsorted(sums, needed)
    places = torch.searchsorted(sums[0], needed.transpose(0, 1).flatten(1))
    return torch.unflatten(places, 1, (needed.shape[0], -1)).transpose(0, 1)
