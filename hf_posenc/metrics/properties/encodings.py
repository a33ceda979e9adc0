"""What a scheme makes of one position, as a row of numbers: the `enc(p)` of the property definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.metrics.properties.specimen import Specimen, positions_at, random_contents, repeated_contents
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.parts import DistanceBias, LogitBias, PairwiseBias, QueryKeyMap
from hf_posenc.schemes.positions import AttentionPairs, Positions


def mapped_basis(query_key_map: QueryKeyMap, specimen: Specimen, positions: Positions) -> tuple[Tensor, Tensor]:
    """The matrices that queries and keys are mapped by.

    Returns:
        Two tensors `(heads, length, mapped width, head_dim)`; column `c` is the image of the unit vector `c`.
    """
    head_dim, heads = specimen.context.head_dim, specimen.context.num_heads
    units = torch.eye(head_dim).view(head_dim, 1, 1, head_dim).expand(-1, heads, positions.ids.shape[-1], -1)
    phases = query_key_map.phases(positions)
    query, key = query_key_map.map_query(units, phases), query_key_map.map_key(units, phases)
    return query.permute(1, 2, 3, 0), key.permute(1, 2, 3, 0)


def position_rows(specimen: Specimen, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """`enc(p)` of every position: the added vector, the flattened map, or the logits as one query sees them.

    A logit bias is not a property of one position. Its row holds the logits, in all heads and for eight contents, of
    the key at `p` for the last of the queries, where every token has the same content; a map that acts beside it is
    part of these logits. A scheme that only scales logits is described by its factors.

    Args:
        specimen: the scheme.
        ids: `(length,)` ascending.
        lengths: `(1, 1)`, the length of the sequence; by default it ends with the last position.

    Returns:
        `(length, width)` float32; width 0 for a scheme that does nothing.
    """
    parts, positions = specimen.parts, positions_at(ids, lengths=lengths)
    rows = []
    if parts.additive is not None:
        rows.append(specimen.additive(positions)[0])
    if parts.logit_bias is not None:
        logits = specimen.logits(positions, repeated_contents(8, ids.shape[0]))
        rows.append(logits[:, :, -1].permute(2, 0, 1).flatten(1))
    elif parts.query_key_map is not None:
        query, key = mapped_basis(parts.query_key_map, specimen, positions)
        matrices = [query] if parts.query_key_map.symmetric else [query, key]
        rows += [matrix.transpose(0, 1).flatten(1) for matrix in matrices]
    if not rows and parts.logit_scale is not None:
        rows.append(parts.logit_scale(positions)[0].T)
    return torch.cat(rows, dim=-1) if rows else torch.zeros(ids.shape[0], 0)


def cast_rows(specimen: Specimen, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """`enc(p)` of every position as a model in `dtype` holds it: computed in float32, rounded last.

    Added vectors, one mapped query and key (per head, where heads differ), and biases of the last query. Where a bias
    is more than a function of distance, every token has the same content.

    Returns:
        `(length, width)` of `dtype`.
    """
    parts, positions = specimen.parts, positions_at(ids)
    rows = []
    if parts.additive is not None:
        rows.append(specimen.additive(positions)[0])
    if parts.query_key_map is not None:
        heads_apart = specimen.context.num_heads if parts.query_key_map.whole_heads else 1
        token = random_contents(1, heads_apart)[0].view(1, -1, 1, specimen.context.head_dim)
        heads = token.expand(-1, -1, ids.shape[0], -1).to(dtype)
        phases = parts.query_key_map.phases(positions)
        mapped = [parts.query_key_map.map_query(heads, phases)]
        if not parts.query_key_map.symmetric:
            mapped.append(parts.query_key_map.map_key(heads, phases))
        rows += [vectors[0].transpose(0, 1).flatten(1) for vectors in mapped]
    if parts.logit_bias is not None:
        rows.append(_bias_row(parts.logit_bias, specimen, positions))
    if not rows and parts.logit_scale is not None:
        rows.append(parts.logit_scale(positions)[0].T)
    return torch.cat([row.to(dtype) for row in rows], dim=-1) if rows else torch.zeros(ids.shape[0], 0, dtype=dtype)


def _bias_row(bias: LogitBias, specimen: Specimen, positions: Positions) -> Tensor:
    """`(length, heads)` float32: the bias of each token's key for the last query, with equal contents."""
    if isinstance(bias, DistanceBias):
        per_head: Tensor = bias(positions.ids[0] - positions.ids[0, -1])
        return per_head.T
    assert isinstance(bias, PairwiseBias)
    length, context = positions.ids.shape[-1], specimen.context
    hidden_states = repeated_contents(1, length)
    query, key = (
        (hidden_states @ weight).unflatten(-1, (context.num_heads, -1)).transpose(1, 2)
        for weight in (specimen.query_weight, specimen.key_weight)
    )
    features = bias.key_features(hidden_states) if bias.num_features else None
    slots = torch.arange(length)
    pairs = AttentionPairs(query, key, slots, positions, context.head_dim**-0.5, hidden_states, features)
    # Equal numbers may differ in the last bits, where they went through different kernels.
    return (pairwise_bias(bias, pairs)[0, :, -1].T / 1e-5).round() * 1e-5
