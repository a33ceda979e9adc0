"""A simple reference implementation of attention logits. Every backend must give the same result.

Tests, property measurements and plots use it. Patched models do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.schemes.parts import DistanceBias, LogitBias, PairwiseBias, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs, Positions


def positional_logits(
    parts: SchemeParts,
    query: Tensor,
    key: Tensor,
    positions: Positions,
    hidden_states: Tensor | None = None,
    scaling: float | Tensor | None = None,
    query_factor: float | Tensor = 1.0,
    key_factor: float | Tensor = 1.0,
) -> Tensor:
    """Computes the attention logits of self-attention, before mask and softmax.

    Args:
        parts: a scheme's parts. The caller applies the additive part to the embeddings.
        query: `(batch, heads, length, head_dim)`.
        key: `(batch, key_value_heads, length, head_dim)`.
        positions: positions of the tokens, `(batch or 1, length)`, in any order.
        hidden_states: `(batch, length, hidden)`, for schemes that read them.
        scaling: factor of `query . key`; `head_dim ** -0.5` by default.
        query_factor: what `query` was multiplied with before, which `scaling` does not contain.
        key_factor: the same for `key`.

    Returns:
        `(batch, heads, length, length)`, queries before keys, in the dtype of the queries.
    """
    pairs = attention_pairs(parts, query, key, positions, hidden_states, scaling, query_factor, key_factor)
    logits = pairs.products * pairs.scaling
    if parts.logit_bias is not None:
        logits = logits + pairwise_bias(parts.logit_bias, pairs).to(logits.dtype)
    if parts.logit_scale is not None:
        logits = logits * parts.logit_scale(positions).unsqueeze(-1).to(logits.dtype)
    return logits


def attention_pairs(
    parts: SchemeParts,
    query: Tensor,
    key: Tensor,
    positions: Positions,
    hidden_states: Tensor | None = None,
    scaling: float | Tensor | None = None,
    query_factor: float | Tensor = 1.0,
    key_factor: float | Tensor = 1.0,
) -> AttentionPairs:
    """Maps queries and keys, and pairs them with what a bias reads. The arguments are those of `positional_logits`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if parts.query_key_map is not None:
        phases = parts.query_key_map.phases(positions)
        query, key = parts.query_key_map.map_query(query, phases), parts.query_key_map.map_key(key, phases)
    features = None
    if isinstance(parts.logit_bias, PairwiseBias) and parts.logit_bias.num_features:
        if hidden_states is None:
            raise ValueError(f"{type(parts.logit_bias).__name__} reads hidden states: give hidden_states.")
        features = parts.logit_bias.key_features(hidden_states)
    slots = torch.arange(query.shape[-2], device=query.device)
    return AttentionPairs(query, key, slots, positions, scaling, hidden_states, features, query_factor, key_factor)


def pairwise_bias(bias: LogitBias, pairs: AttentionPairs) -> Tensor:
    """`(batch or 1, heads, query_len, key_len)` of either kind of bias."""
    if isinstance(bias, DistanceBias):
        per_head: Tensor = bias(pairs.distance)
        return per_head.transpose(0, 1)
    return bias(pairs)
