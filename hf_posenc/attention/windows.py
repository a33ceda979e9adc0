"""Which keys can change the result of each query, under a bias that decays.

For query i with logits l_ij, a lower bound of the row's largest logit is that of its own key, l_ii. An upper bound of
the logit of key j is `scaling * |q_i| * max |k| + bias_ij`. Where the second lies far enough below the first, the keys
that are left out weigh so little, all of them together, that the result is the same to within a rounding of its dtype.
Adaptive Computation Pruning (arXiv:2504.06949, section 3) does so for forget gates; here it serves every bias that
decays, because it asks for nothing but upper bounds of the bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Below this many keys the bounds cost more than they save.
SHORTEST = 1024
#: First and last keys are rounded outwards to multiples of this, the tile of torch's CPU kernel.
_TILE = 64
#: A head joins the heads before it where the keys that this adds to them are at most this share.
_JOINED = 0.125


@dataclass(frozen=True)
class Windows:
    """The keys outside of which none changes the result of a query.

    Args:
        first: `(batch, heads, query_len)` int64, the first key of each query.
        last: `(batch, heads, query_len)` int64, the last key of each query.
        key_length: number of keys.
    """

    first: Tensor
    last: Tensor
    key_length: int

    def of_rows(self, item: int, start: int, stop: int) -> Iterator[tuple[slice, int, int]]:
        """Neighbouring heads, and the first and the end of the keys that the queries `[start, stop)` need in them."""
        firsts: list[int] = (self.first[item, :, start:stop].amin(-1) // _TILE * _TILE).tolist()
        ends: list[int] = (-(-(self.last[item, :, start:stop].amax(-1) + 1) // _TILE) * _TILE).tolist()
        begin, first, end = 0, firsts[0], ends[0]
        for head in range(1, len(firsts) + 1):
            if head < len(firsts):
                joined = (min(first, firsts[head]), max(end, ends[head]))
                heads = head - begin
                separate = heads * (end - first) + ends[head] - firsts[head]
                if (heads + 1) * (joined[1] - joined[0]) <= separate * (1 + _JOINED):
                    first, end = joined
                    continue
            yield slice(begin, head), first, min(end, self.key_length)
            if head < len(firsts):
                begin, first, end = head, firsts[head], ends[head]


def windows_of_distance(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Windows | None:
    """The windows of a bias of distance, or `None` where all keys count or looking for them does not pay.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        vector: `(heads, query_len + key_len - 1)`, the bias by rising distance.
        mask: boolean, `(batch or 1, 1 or heads, query_len or 1, key_len)`, or `None`. An additive mask has no windows.
        scaling: factor of `query . key`.
        causal: whether query i sees no key behind key i.
    """
    if not _pays(query, key, mask):
        return None
    query_length, key_length = query.shape[2], key.shape[2]
    own = key_length - 1
    # Nearer keys may have a smaller bias than farther ones: what counts is the largest of all that are as far or farther.
    behind = vector.detach().cummax(-1).values
    ahead = behind if causal else vector.detach().flip(-1).cummax(-1).values
    slack = _slack(key, value, query.dtype)
    if not bool((behind[:, own] - behind[:, 0] > slack).any()) and not bool((ahead[:, -1] - ahead[:, 0] > slack).any()):
        return None
    needed = _needed(query, key, mask, scaling, slack).to(vector.dtype) + vector.detach()[:, own].view(1, -1, 1)
    rows = torch.arange(query_length, device=query.device)
    reached = _first_at_least(behind, needed) - query_length + 1 + rows
    own_key = rows + key_length - query_length
    first = torch.minimum(reached.clamp(min=0), own_key)
    if causal:
        return Windows(first, own_key.expand_as(first), key_length)
    reached = query_length + key_length - 2 - _first_at_least(ahead, needed) - query_length + 1 + rows
    return Windows(first, torch.maximum(reached.clamp(max=key_length - 1), own_key), key_length)


def windows_of_terms(
    query: Tensor, key: Tensor, value: Tensor, terms: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> Windows | None:
    """The windows of a bias `terms[j] - terms[i]`, or `None` where all keys count or looking for them does not pay.

    Args:
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.
        value: `(batch, key_value_heads, key_len, value_dim)`.
        terms: `(batch, heads, key_len)` float32.
        mask: boolean, `(batch or 1, 1 or heads, query_len or 1, key_len)`, or `None`. An additive mask has no windows.
        scaling: factor of `query . key`.
        causal: whether query i sees no key behind key i.
    """
    if not _pays(query, key, mask):
        return None
    behind = terms.detach().cummax(-1).values
    slack = _slack(key, value, query.dtype)
    if not bool((behind[..., -1] - behind[..., 0] > slack).any()):
        return None
    key_length = key.shape[2]
    own_key = torch.arange(key_length - query.shape[2], key_length, device=query.device)
    needed = _needed(query, key, mask, scaling, slack).to(terms.dtype) + terms.detach()[..., own_key]
    first = torch.minimum(torch.searchsorted(behind.contiguous(), needed.contiguous()), own_key)
    last = own_key.expand_as(first) if causal else torch.full_like(first, key_length - 1)
    return Windows(first, last, key_length)


def _pays(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    # Reading bounds from an accelerator would hold it up in every layer.
    if query.device.type != "cpu" or key.shape[2] < SHORTEST or query.shape[2] < 2:
        return False
    return (mask is None or mask.dtype == torch.bool) and key.shape[2] >= query.shape[2]


def _slack(key: Tensor, value: Tensor, dtype: torch.dtype) -> float:
    """How far below the largest logit of a row all other keys together are a quarter of a rounding step.

    Values may differ in size: a key that weighs nothing may have the one large value. So it is a quarter of a rounding
    step of the mean value.
    """
    sizes = value.detach().float().norm(dim=-1)
    ratio = float(sizes.amax() / sizes.mean().clamp(min=torch.finfo(torch.float32).tiny))
    if not math.isfinite(ratio):
        return math.inf
    return math.log(key.shape[2]) - math.log(torch.finfo(dtype).eps / 4) + math.log(max(ratio, 1.0))


def _needed(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, slack: float) -> Tensor:
    """`(batch, heads, query_len)` float32: a key counts where its bias less that of the own key is at least this."""
    query, key = query.detach().float(), key.detach().float()
    groups = query.shape[1] // key.shape[1]
    longest = key.norm(dim=-1).amax(-1).repeat_interleave(groups, 1).unsqueeze(-1)
    own_keys = key[:, :, key.shape[2] - query.shape[2] :].repeat_interleave(groups, 1)
    own = scaling * torch.linalg.vecdot(query, own_keys)
    needed = own - abs(scaling) * query.norm(dim=-1) * longest - slack
    if mask is not None:
        sees_itself = mask.diagonal(key.shape[2] - query.shape[2], -2, -1) if mask.shape[2] > 1 else None
        if sees_itself is None:
            sees_itself = mask[:, :, 0, key.shape[2] - query.shape[2] :]
        needed = needed.masked_fill(~sees_itself, -torch.inf)
    # Whatever is no number has to be seen.
    return needed.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _first_at_least(rising: Tensor, needed: Tensor) -> Tensor:
    """Where in `(heads, count)` rising numbers the first is at least `needed`, `(batch, heads, rows)`."""
    found = torch.searchsorted(rising.contiguous(), needed.transpose(0, 1).flatten(1).contiguous())
    return found.unflatten(1, (needed.shape[0], -1)).transpose(0, 1)
