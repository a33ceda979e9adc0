"""Attention in plain operations, with the whole matrix of scores: the reference of every fast form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    """`(batch, query_len, heads, width)`; `bias` is `(batch or 1, heads, query_len, key_len)`.

    A query without keys gets the mean of the values, and no gradient of its scores.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query.double() @ key.double().transpose(-1, -2) * scaling + bias.double()
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    if mask is not None:
        smallest = torch.finfo(torch.float32).min
        hidden = ~mask if mask.dtype == torch.bool else mask <= smallest / 2
        scores = (scores if mask.dtype == torch.bool else scores + mask).masked_fill(hidden, smallest)
    return (scores.softmax(-1) @ value.double()).transpose(1, 2)


def toeplitz(vector: Tensor, query_length: int, key_length: int) -> Tensor:
    """`(1, heads, query_len, key_len)` of a bias `(heads, query_len + key_len - 1)` by rising distance."""
    queries, keys = torch.arange(query_length).unsqueeze(-1), torch.arange(key_length)
    return vector[:, keys - queries + query_length - 1].unsqueeze(0)


def masks(batch: int, query_length: int, key_length: int) -> dict[str, Tensor | None]:
    """One of every kind that transformers hands over, `(batch or 1, 1, query_len, key_len)`."""
    queries = torch.arange(query_length).unsqueeze(-1) + (key_length - query_length)
    keys = torch.arange(key_length)
    causal = keys <= queries
    # Every row of the batch has a real token.
    real = keys >= (torch.arange(batch).unsqueeze(-1) * 3).clamp(max=key_length - 1)
    own = keys == queries
    documents = keys // 5 == queries // 5
    smallest = torch.finfo(torch.float32).min
    additive = torch.zeros(1, 1, query_length, key_length).masked_fill(~causal, smallest)
    before = causal & real[:, None, None]
    return {
        "none": None,
        "left padding": before | own,
        "queries without keys": before,
        "queries without keys, additive": torch.zeros(before.shape).masked_fill(~before, smallest),
        "right padding": real.flip(-1)[:, None, None].expand(-1, 1, query_length, -1),
        "one row for all queries": real.flip(-1)[:, None, None],
        "packed": (causal & documents)[None, None],
        "window": (causal & (keys > queries - 4))[None, None],
        "additive": additive,
    }


def gradients(output: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Those of a sum in which every number of an output has a separate weight, the same in every call."""
    weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad((output.double() * weights).sum(), given, retain_graph=True)


def assert_gradients_agree(
    found: Tensor, given: Sequence[Tensor], wanted: Tensor, references: Sequence[Tensor], bound: float
) -> None:
    """Of two outputs for inputs of their own; the norm of each difference is relative to that of the reference."""
    for one, other in zip(gradients(found, given), gradients(wanted, references), strict=True):
        assert float((one - other).norm() / other.norm()) <= bound
