"""Encodings as one row of numbers per position: are they unique, the same in longer texts, good in half precision?"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from hf_posenc.metrics.properties.specimen import (
    TRAINING_LENGTH,
    DoesNotApplyError,
    Found,
    Refusals,
    Specimen,
    build_specimen,
    measured,
    positions_at,
    random_contents,
    repeated_contents,
)
from hf_posenc.metrics.quantization import rounded_ids
from hf_posenc.report.tables import format_number
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.logits import attention_pairs, pairwise_bias
from hf_posenc.schemes.parts import DistanceBias, LogitBias, PairwiseBias, QueryKeyMap, SchemeParts
from hf_posenc.schemes.positions import Positions


def mapped_basis(query_key_map: QueryKeyMap, specimen: Specimen, positions: Positions) -> tuple[Tensor, Tensor]:
    """Returns the matrices that map queries and keys, each `(heads, length, mapped width, head_dim)`.

    Column `c` is the image of the unit vector `c`.
    """
    head_dim, heads = specimen.context.head_dim, specimen.context.num_heads
    units = torch.eye(head_dim).view(head_dim, 1, 1, head_dim).expand(-1, heads, positions.ids.shape[-1], -1)
    phases = query_key_map.phases(positions)
    query, key = query_key_map.map_query(units, phases), query_key_map.map_key(units, phases)
    return query.permute(1, 2, 3, 0), key.permute(1, 2, 3, 0)


def position_rows(specimen: Specimen, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Returns `enc(p)` of every position: the added vector, the flattened map, or the logits as one query sees them.

    A logit bias is not a property of one position. Its row has the logits, in all heads and for eight contents, of the
    key at `p` for the last query, where every token has the same content. A map that the scheme uses together with the
    bias is part of these logits. A scheme that only scales logits is described by its factors.

    Returns `(length, width)` float32 for ascending ids `(length,)`; the width is 0 for a scheme that does nothing.
    """
    parts, positions = specimen.parts, positions_at(ids, lengths=lengths)
    rows = [] if parts.additive is None else [specimen.additive(positions)[0]]
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
    """Returns `enc(p)` as in a model in `dtype`: computed in float32, rounded last; `(length, width)`.

    It has added vectors, one mapped query and key (per head, if heads differ), and biases of the last query. If a bias
    depends on more than the distance, every token has the same content.
    """
    parts, positions = specimen.parts, positions_at(ids)
    rows = [] if parts.additive is None else [specimen.additive(positions)[0]]
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
    """Returns `(length, heads)` float32: the bias of each token's key for the last query, with equal contents."""
    if isinstance(bias, DistanceBias):
        return bias(positions.ids[0] - positions.ids[0, -1]).T
    hidden_states = repeated_contents(1, positions.ids.shape[-1])
    heads = specimen.projected(hidden_states)
    pairs = attention_pairs(SchemeParts(logit_bias=bias), *heads, positions, hidden_states)
    # Equal numbers may differ in the last bits if they went through different kernels.
    return (pairwise_bias(bias, pairs)[0, :, -1].T / 1e-5).round() * 1e-5


#: Closer encodings count as equal. This is several times the rounding of a float32 logit of a few units.
UNIQUE_ABOVE = 1e-5
CONSISTENT_UP_TO = 1e-5
#: Beyond the training length, and beyond the first step of a temperature that rises every 8192 tokens.
GROWN_TO = (2 * TRAINING_LENGTH, 32 * TRAINING_LENGTH)


@measured(UNIQUE_ABOVE)
def uniqueness(specimen: Specimen, refusals: Refusals, *, length: int = 2 * TRAINING_LENGTH) -> Found | None:
    """Measures the smallest distance between the encodings of two positions below `length`, `u(T)`.

    The first and the last 256 positions are compared, each with every other. For schemes that have no positions beyond
    the training length, `T` is that length; it is at least 256.

    An encoding is the added vector, the flattened map of queries and keys, or, for a logit bias, the logits of a key as
    the last query sees them, if all tokens have the same content (`position_rows`). Passes above 1e-5.
    `details["pair"]` are the two positions, and `details["distinct"]` the number of encodings that differ from all
    earlier ones by more than the threshold, of the `details["compared"]`.
    """
    for count in (length, TRAINING_LENGTH):
        with refusals.at(f"positions up to {count - 1}"):
            ids = torch.cat((torch.arange(256), torch.arange(count - 256, count))).unique()
            distance, rows, distinct = nearest_rows(position_rows(specimen, ids))
            pair = [int(ids[row]) for row in rows]
            details = {"length": count, "compared": ids.shape[0], "pair": pair, "distinct": distinct}
            return distance, details, distance > UNIQUE_ABOVE, None
    return None


@measured(CONSISTENT_UP_TO)
def length_consistency(specimen: Specimen, refusals: Refusals) -> Found | None:
    """Measures how far encodings move in a longer sequence: the largest `max_p |enc_T(p) - enc_S(p)|` over lengths `S`.

    A scheme that fails cannot extend a cache, because the encodings of cached tokens change. The sequence grows from
    `T = 256` to twice `T`, and to 2 and 32 times the training length, because many schemes depend on the length only
    beyond the one that they were built for. Logits are compared too, for different contents, because a bias or a scale
    may depend on the length without an encoding. Passes up to 1e-5, relative to the largest encoding if that is more
    than 1. `details["by_length"]` has the difference for each `S`.
    """
    if not any(True for _ in specimen.parts):
        raise DoesNotApplyError("the scheme encodes nothing")
    length = 256
    by_length: dict[int, float] = {}
    ids = torch.arange(length)
    with refusals.at(f"sequences of {length} tokens"):
        short = position_rows(specimen, ids, torch.tensor([[length]]))
        largest = short.norm(dim=-1).max().clamp(min=1)
        for total in (2 * length, *GROWN_TO):
            long = position_rows(specimen, ids, torch.tensor([[total]]))
            difference = float((short - long).norm(dim=-1).max() / largest)
            by_length[total] = difference
            if specimen.parts.logit_scale is not None:
                lengths = (torch.tensor([[shown]]) for shown in (length, total))
                factors = [specimen.parts.logit_scale(positions_at(ids, lengths=shown)) for shown in lengths]
                by_length[total] = max(difference, float((factors[0] - factors[1]).abs().max()))
    return None if refusals else (max(by_length.values()), {"length": length, "by_length": by_length})


def nearest_rows(rows: Tensor) -> tuple[float, list[int], int]:
    """Returns distance and indices of the two nearest rows, and the number of rows that repeat no earlier row."""
    count = rows.shape[0]
    # Columns in which all positions are equal add nothing to any distance.
    columns = rows[:, (rows != rows[:1]).any(dim=0)].double()
    first, second = torch.triu_indices(count, count, offset=1)
    approximate = torch.cdist(columns, columns)[first, second]
    # `cdist` subtracts squares, which loses digits, so the nearest candidates are compared again directly.
    nearest = approximate.topk(min(64, len(approximate)), largest=False).indices
    distances = (columns[first[nearest]] - columns[second[nearest]]).norm(dim=-1)
    best = nearest[distances.argmin()]
    repeating = second[approximate <= UNIQUE_ABOVE].unique().numel()
    return float(distances.min()), [int(first[best]), int(second[best])], count - repeating


POSITIONS = (0, 1000, 16000, 64000)
#: Largest error of a logit, in spacings of numbers at 1. Rounding queries, keys and their products costs about three.
DEFECT_ULPS = 8
#: The weight of logits this far below the largest is less than 1e-4 of its weight.
NEGLIGIBLE_BELOW = 10.0


@measured(1.0)
def low_precision(specimen: Specimen, refusals: Refusals, dtype: torch.dtype, *, length: int = 65536) -> Found | None:
    """Measures how well a scheme works in a model that computes in half precision.

    (a) How many positions have a unique encoding, if it is computed in float32 from integer positions and rounded last,
    as the parts of this package do; and how many if the positions are rounded first, as by `position_ids.to(dtype)`,
    which is a mistake: bfloat16 has no 257. (b) How far logits are from those of float32 with the same rounded contents
    and projections, for 16 tokens from each of several positions on.

    Passes if encodings that differ in float32 also differ after rounding, and no logit is off by more than 8 times the
    spacing of numbers at 1 (0.0078 in float16, 0.0625 in bfloat16; without positions logits have a variance of 1).

    (a) uses `length` positions, or fewer if a scheme ends earlier or compares all pairs. The value is the share of the
    encodings that stay unique. `details` has that share with positions rounded first, the first position that would
    repeat an earlier one, and the error of logits by position.
    """
    if not any(True for _ in specimen.parts):
        raise DoesNotApplyError("the scheme encodes nothing")
    cast, form = None, str(dtype).removeprefix("torch.")
    # A bias on pairs needs all of them for one row; a table ends at the training length.
    lengths = [512] if isinstance(specimen.parts.logit_bias, PairwiseBias) else [length, TRAINING_LENGTH]
    for count in lengths:
        with refusals.at(f"positions up to {count - 1}"):
            ids = torch.arange(count)
            # A position may round up to one after the last, which the scheme may not have.
            first = rounded_ids(ids, form).clamp(max=count - 1).unique()
            exact = _unique_in_float32(specimen, count)
            cast, cast_first = (
                unique_rows(cast_rows(specimen, *cut)) for cut in ((ids, dtype), (first, torch.float32))
            )
            break
    if cast is None:
        return None
    share = cast / exact
    defects: dict[int, float] = {}
    for position in POSITIONS:
        with refusals.at(f"logits at position {position}"):
            defects[position] = logit_defect(specimen, position, dtype)
    allowed, worst = DEFECT_ULPS * torch.finfo(dtype).eps, max(defects.values(), default=0.0)
    details = {
        "length": count,
        "unique_float32": exact / count,
        "unique": cast / count,
        "unique_ids_cast_first": cast_first / count,
        "first_collision_ids_cast_first": int(
            (rounded_ids(torch.arange(4096), form) - torch.arange(4096)).nonzero()[0]
        ),
        "logit_defect": defects,
        "logit_defect_allowed": allowed,
    }
    passed = share >= 1 and worst <= allowed
    return share, details, passed, f"logits {format_number(worst)}" if share >= 1 and not passed else None


@functools.lru_cache(maxsize=1)
def _unique_in_float32(specimen: Specimen, count: int) -> int:
    """Returns how many of the first encodings differ. It is cached, because every format is compared with it."""
    return unique_rows(cast_rows(specimen, torch.arange(count), torch.float32))


@torch.no_grad()
def logit_defect(scheme: str | SchemeConfig | Specimen, position: int, dtype: torch.dtype) -> float:
    """Returns how far logits computed in `dtype` are from those in float32, for 16 tokens from `position` on.

    Logits more than 10 below the largest of their query are ignored: a softmax gives them no weight, and their rounding
    grows with their size.
    """
    specimen = build_specimen(scheme)
    query_weight, key_weight = (weight.to(dtype).float() for weight in (specimen.query_weight, specimen.key_weight))
    rounded = dataclasses.replace(specimen, query_weight=query_weight, key_weight=key_weight)
    contents = random_contents(4, 16).to(dtype).float()
    positions, visible = positions_at(torch.arange(position, position + 16)), specimen.visible(16)
    reference = rounded.logits(positions, contents).masked_fill(~visible, -torch.inf)
    counts = reference >= reference.amax(dim=-1, keepdim=True) - NEGLIGIBLE_BELOW
    difference = (rounded.logits(positions, contents, dtype).float()[counts] - reference[counts]).abs()
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def unique_rows(rows: Tensor) -> int:
    """Returns the number of different rows. Their bit patterns are compared, with one zero."""
    # This makes negative zeros positive.
    words = (rows + 0.0).contiguous().view(torch.int32 if rows.dtype == torch.float32 else torch.int16)
    return len({row.tobytes() for row in words.numpy()})
