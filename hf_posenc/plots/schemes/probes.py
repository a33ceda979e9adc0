"""Numbers that the figures draw, measured from the parts of a scheme without knowing which scheme it is."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.positions import Positions, integer_range

#: A logit below this says "never look here", and would hide everything else on a colour scale.
AWAY = -1000.0


def added_vectors(subject: Subject, length: int) -> Tensor:
    """`(length, hidden)`: what an additive encoding adds at positions `0 .. length - 1`."""
    assert subject.parts.additive is not None
    vectors: Tensor = subject.parts.additive(subject.positions(length))[0]
    return vectors.float()


def mapped_vectors(subject: Subject, query: Tensor, length: int, step: int = 1) -> Tensor:
    """`(length, width)`: one query `(head_dim,)` of the first head, mapped at `length` positions, `step` apart."""
    part = subject.parts.query_key_map
    assert part is not None
    repeated = query.expand(1, subject.context.num_heads, length, query.shape[-1])
    return part.map_query(repeated, part.phases(subject.positions(length, step)))[0, 0].float()


def random_query(subject: Subject) -> Tensor:
    """`(head_dim,)`: a standard normal query."""
    return torch.randn(subject.context.head_dim, generator=torch.Generator().manual_seed(INPUT_SEED))


def bias_matrix(subject: Subject, length: int, seed: int = INPUT_SEED) -> Tensor:
    """`(heads, length, length)`: what the bias adds for random queries, keys and hidden states."""
    bias = subject.parts.logit_bias
    positions = subject.positions(length)
    if isinstance(bias, DistanceBias):
        per_head: Tensor = bias(positions.ids[0].unsqueeze(0) - positions.ids[0].unsqueeze(1))
        return per_head.float()
    return added_bias(subject, positions, *subject.random_heads(length, seed=seed))[0]


def added_bias(subject: Subject, positions: Positions, query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
    """`(batch, heads, length, length)`: what the bias adds for these queries, keys and hidden states."""
    biased, plain = (
        positional_logits(dataclasses.replace(subject.parts, **without), query, key, positions, hidden)
        for without in ({"logit_scale": None}, {"logit_scale": None, "logit_bias": None})
    )
    return biased - plain


def visible(subject: Subject, length: int) -> Tensor:
    """`(length, length)` bool, queries before keys: which pairs the mask of this place shows."""
    every = torch.ones(length, length, dtype=torch.bool)
    return every.tril() if subject.context.causal else every


def equal_query_key_logits(subject: Subject, positions: Positions, samples: int) -> Tensor:
    """`(samples, heads, length, length)`: logits of tokens whose queries and keys are all one random vector.

    The vector is standard normal and the same in every head. Hidden states are independent.
    """
    heads, width, length = subject.context.num_heads, subject.context.head_dim, positions.ids.shape[-1]
    generator = torch.Generator().manual_seed(INPUT_SEED)
    vectors = torch.randn(samples, 1, 1, width, generator=generator)
    results = []
    for one in vectors.expand(samples, heads, length, width).split(1):
        hidden = torch.randn(1, length, subject.context.hidden_size, generator=generator)
        results.append(positional_logits(subject.parts, one, one, positions, hidden))
    return torch.cat(results)


def turning_frequencies(subject: Subject, length: int) -> Tensor | None:
    """By how many radians each pair turns from one position to the next, in a sequence of `length` tokens.

    Returns:
        `(rows, pairs)`, one row for all heads, or one per head, or one per axis of a map that reads coordinates; `None`
        where the map does not tell its angles or frequencies.
    """
    part = subject.parts.query_key_map
    angles, frequencies = getattr(part, "angles", None), getattr(part, "inverse_frequencies", None)
    if part is None or (not callable(angles) and frequencies is None):
        return None
    lengths = torch.tensor([[length]])
    if callable(angles) and part.reads_coordinates:
        axes = int(getattr(part, "axes", 2))
        steps = torch.cat((torch.zeros(axes, 1, dtype=torch.int64), torch.eye(axes, dtype=torch.int64)), dim=1)
        turned = angles(Positions(integer_range(0, axes + 1), lengths, coordinates=steps.unsqueeze(1)))[0]
        per_axis: Tensor = (turned[1:] - turned[:1]).float()
        return per_axis if per_axis.ndim == 2 else per_axis[:, 0]
    if callable(angles):
        turned = angles(Positions(integer_range(0, 2), lengths))[0]
        frequencies = turned[1] - turned[0]
    elif callable(frequencies):
        frequencies = frequencies(lengths)
    assert isinstance(frequencies, Tensor)
    return frequencies.float().reshape(-1, frequencies.shape[-1])
