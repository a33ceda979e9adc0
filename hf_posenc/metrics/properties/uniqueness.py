"""Does every position have an encoding of its own, and does it keep it when the sequence grows?"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.metrics.properties.encodings import position_rows
from hf_posenc.metrics.properties.measurement import DoesNotApplyError, Found, Refusals, measured
from hf_posenc.metrics.properties.specimen import TRAINING_LENGTH, Specimen, positions_at

#: Encodings nearer than this are the same: the rounding of a float32 logit of a few units, a few times over.
UNIQUE_ABOVE = 1e-5
CONSISTENT_UP_TO = 1e-5
#: Past the training length, and past the first step of a temperature that rises every 8192 tokens.
GROWN_TO = (2 * TRAINING_LENGTH, 32 * TRAINING_LENGTH)


@measured(UNIQUE_ABOVE)
def uniqueness(specimen: Specimen, refusals: Refusals, *, length: int = 2 * TRAINING_LENGTH) -> Found | None:
    """The smallest distance between the encodings of two positions below `length`, `u(T)`.

    Compared are the first and the last 256 positions, each with every other; `T` is the training length for schemes
    that have no positions past it, and at least 256.

    An encoding is the added vector, the flattened map of queries and keys, or, for a logit bias, the logits of a key as
    the last query sees them, where all tokens have the same content (`position_rows`). Passes above 1e-5.
    `details["pair"]` are the two positions, `details["distinct"]` the number of encodings that differ from all earlier
    ones by more than the threshold, of the `details["compared"]`.
    """
    for count in (length, TRAINING_LENGTH):
        with refusals.at(f"positions up to {count - 1}"):
            ids = torch.cat((torch.arange(256), torch.arange(count - 256, count))).unique()
            distance, rows, distinct = nearest_rows(position_rows(specimen, ids))
            pair = [int(ids[row]) for row in rows]
            details = {"length": count, "compared": ids.shape[0], "pair": pair, "distinct": distinct}
            return Found(distance, details, passed=distance > UNIQUE_ABOVE)
    return None


@measured(CONSISTENT_UP_TO)
def length_consistency(specimen: Specimen, refusals: Refusals, *, length: int = 256) -> Found | None:
    """How far encodings move when the sequence grows: the largest `max_p |enc_T(p) - enc_S(p)|` over the lengths `S`.

    A scheme that fails cannot extend a cache: what it said about the tokens so far is no longer true. The sequence
    grows from `T = length`, less than the training length, to twice `T`, and to 2 and 32 times the training length,
    because many schemes begin to follow the length only past the one they were built for. The logits are compared too,
    for contents that differ, because a bias or a scale may depend on the length without an encoding of its own. Passes
    up to 1e-5, relative to the largest encoding where that is more than 1. `details["by_length"]` has the difference
    for each `S`.
    """
    if not any(True for _ in specimen.parts):
        raise DoesNotApplyError("the scheme encodes nothing")
    by_length: dict[int, float] = {}
    ids = torch.arange(length)
    with refusals.at(f"sequences of {length} tokens"):
        short = position_rows(specimen, ids, torch.tensor([[length]]))
        largest = short.norm(dim=-1).max().clamp(min=1)
        for total in (2 * length, *GROWN_TO):
            long = position_rows(specimen, ids, torch.tensor([[total]]))
            difference = float((short - long).norm(dim=-1).max() / largest)
            by_length[total] = max(difference, _scale_difference(specimen, ids, total))
    return None if refusals else Found(max(by_length.values()), {"length": length, "by_length": by_length})


def nearest_rows(rows: Tensor) -> tuple[float, list[int], int]:
    """The two rows nearest to each other.

    Returns:
        Their distance, their indices, and how many rows are farther than the threshold from all rows before them.
    """
    count = rows.shape[0]
    # Columns that all positions share add nothing to any distance.
    columns = rows[:, (rows != rows[:1]).any(dim=0)].double()
    squares = columns.square().sum(dim=-1)
    approximate = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * columns @ columns.T).clamp(min=0)
    # The difference of squares cancels, so the nearest candidates are compared once more, directly.
    later = torch.ones(count, count, dtype=torch.bool).tril(diagonal=-1)
    candidates = (
        approximate.masked_fill(~later, torch.inf).flatten().topk(min(64, count * (count - 1) // 2), largest=False)
    )
    first, second = candidates.indices % count, candidates.indices // count
    distances = (columns[first] - columns[second]).norm(dim=-1)
    best = int(distances.argmin())
    duplicate = (approximate.sqrt() <= UNIQUE_ABOVE).logical_and(later).any(dim=-1)
    return float(distances[best]), [int(first[best]), int(second[best])], count - int(duplicate.sum())


def _scale_difference(specimen: Specimen, ids: Tensor, total: int) -> float:
    scale = specimen.parts.logit_scale
    if scale is None:
        return 0.0
    short, long = (scale(positions_at(ids, lengths=torch.tensor([[count]]))) for count in (ids.shape[0], total))
    return float((short - long).abs().max())
