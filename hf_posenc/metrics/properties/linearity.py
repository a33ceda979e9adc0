"""Is a step of k positions a linear map that does not depend on the starting position?"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.metrics.properties.encodings import mapped_basis
from hf_posenc.metrics.properties.specimen import (
    TRAINING_LENGTH,
    DoesNotApplyError,
    Found,
    Refusals,
    Specimen,
    measured,
    positions_at,
)
from hf_posenc.schemes.additive.sinusoidal import SinusoidalConfig
from hf_posenc.schemes.parts import PairwiseBias, QueryKeyMap

LENGTH = 131072
SHIFTS = (1, 7, 64, 500)
#: Maps are compared up to here: the rounding of float32 angles grows with their size, and the residual with it.
MAPS_UP_TO = 16384
#: A fit over half of the positions is extended to the other half. In float32 this multiplies their rounding of 1e-7 by
#: the condition number of the fit (in float64 a sinusoidal table stays below 1e-9).
LINEAR_UP_TO = 1e-3
#: Directions in which the table has less than this share of its largest extent are rounding and are not fitted.
_NEGLIGIBLE = 1e-6
#: Number of positions that are sampled at random.
_ROWS = 1024


@measured(LINEAR_UP_TO)
def linearity(specimen: Specimen, refusals: Refusals) -> Found | None:
    """Measures how far `PE(p + k) = M_k PE(p)` or `R_{p+k} = M_k R_p` is from true, for the best `M_k`.

    For vectors, `M_k` is fitted by least squares to the first half of the positions, and the residual is that of the
    second half, relative to the length of the vectors. A sinusoidal table is also measured with the explicit block
    rotation (`sinusoidal_shift`). For maps of queries and keys, `M_k = R_k R_0^{-1}`, that is `R_k` if position 0 is
    not mapped at all. A map that changes the width of a head is fitted like vectors. Passes up to 1e-3.

    Some of 131072 positions are sampled, or of the training length if the scheme has no more. The slowest frequencies
    of a table turn within this length; otherwise a fit could not distinguish them from a constant. `k` is one of 1, 7,
    64 and 500. `details["by_shift"]` has the largest residual per shift, `details["affine"]` the largest residual of
    `PE(p + k) = M_k PE(p) + c_k`, `details["explicit"]` that of the explicit rotations.
    """
    parts = specimen.parts
    if parts.additive is None and parts.query_key_map is None:
        raise DoesNotApplyError("the scheme neither adds vectors nor maps queries and keys")
    if isinstance(parts.logit_bias, PairwiseBias) and parts.logit_bias.reads_heads and parts.query_key_map is not None:
        raise DoesNotApplyError("the map of a key depends on the query it is paired with")
    by_shift: dict[int, float] = {}
    largest: dict[str, float] = {}
    # A table ends at the training length.
    for count in (LENGTH, TRAINING_LENGTH):
        with refusals.at(f"positions up to {count - 1}"):
            for shift in SHIFTS:
                residuals = {} if parts.additive is None else _vector_residuals(specimen, count, shift)
                if parts.query_key_map is not None:
                    residuals["map"] = _map_residual(specimen, parts.query_key_map, min(count, MAPS_UP_TO), shift)
                by_shift[shift] = max(residuals.pop(name) for name in ("fitted", "map") if name in residuals)
                largest |= {name: max(value, largest.get(name, 0.0)) for name, value in residuals.items()}
            break
    return (max(by_shift.values()), {"length": count, "by_shift": by_shift, **largest}) if by_shift else None


def sinusoidal_shift(config: SinusoidalConfig, hidden_size: int, shift: int) -> Tensor:
    """Returns the matrix `M_k` that moves a sinusoidal table by `k` positions: `PE(p + k) = M_k PE(p)`.

    For the frequency `w` of a pair, by the addition theorems::

        sin((p + k) w) =  cos(k w) sin(p w) + sin(k w) cos(p w)
        cos((p + k) w) = -sin(k w) sin(p w) + cos(k w) cos(p w)

    so `M_k` rotates every pair by `k w` for every `p`.

    Args:
        config: frequencies, base and layout of the table; scale and offset cancel.
        hidden_size: an even width of the vectors, `hidden`.
        shift: `k`.

    Returns:
        `(hidden, hidden)` float64.

    Raises:
        ValueError: for an odd width, in which a sine has no cosine.
    """
    if hidden_size % 2:
        raise ValueError(f"A sinusoidal table of width {hidden_size} has a sine without a cosine; use an even width.")
    pairs = hidden_size // 2
    steps = torch.arange(pairs, dtype=torch.float64)
    exponents = steps / pairs if config.frequencies == "vaswani" else steps / (pairs - 1)
    angles = shift * config.base**-exponents
    index = torch.arange(pairs)
    sines, cosines = (2 * index, 2 * index + 1) if config.layout == "interleaved" else (index, index + pairs)
    if config.layout == "cosines_first":
        sines, cosines = cosines, sines
    matrix = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
    matrix[sines, sines] = matrix[cosines, cosines] = angles.cos()
    matrix[sines, cosines], matrix[cosines, sines] = angles.sin(), -angles.sin()
    return matrix


def fitted_residual(source: Tensor, target: Tensor, fitted: Tensor) -> float:
    """Returns the largest residual of a linear map `(rows, width)` -> `(rows, width)`, relative to the target's length.

    The map is fitted by least squares to the rows in `fitted`; the residual is that of the other rows.
    """
    source, target = source.double(), target.double()
    solution = torch.linalg.lstsq(source[fitted], target[fitted], rcond=_NEGLIGIBLE, driver="gelsd").solution
    return _relative_residual(source[~fitted] @ solution, target[~fitted])


def _relative_residual(actual: Tensor, expected: Tensor) -> float:
    smallest = torch.finfo(torch.float32).tiny
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=smallest)).max())


def _vector_residuals(specimen: Specimen, length: int, shift: int) -> dict[str, float]:
    """Returns the residuals of a fit without and with a constant, and of the explicit rotations if they are known."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randperm(length - shift, generator=generator)[:_ROWS].sort().values
    lengths = torch.tensor([[length]])
    source, target = (specimen.additive(positions_at(ids, lengths=lengths))[0] for ids in (starts, starts + shift))
    first_half = starts < (length - shift) // 2
    constant = torch.ones(source.shape[0], 1)
    residuals = {
        "fitted": fitted_residual(source, target, first_half),
        "affine": fitted_residual(torch.cat((source, constant), dim=-1), target, first_half),
    }
    if isinstance(specimen.config, SinusoidalConfig):
        matrix = sinusoidal_shift(specimen.config, source.shape[-1], shift)
        residuals["explicit"] = _relative_residual(source.double() @ matrix.T, target.double())
    return residuals


def _map_residual(specimen: Specimen, query_key_map: QueryKeyMap, length: int, shift: int) -> float:
    starts = torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, length // 2, length - shift - 1]).unique()
    places = (starts, starts + shift, torch.tensor([0, shift]))
    bases = [mapped_basis(query_key_map, specimen, positions_at(ids)) for ids in places]
    residuals = []
    # For queries, then for keys.
    for start, end, steps in zip(*bases, strict=True):
        if start.shape[-1] != start.shape[-2]:
            # Each image of a unit vector at each position is one row to fit.
            fitted = (torch.arange(starts.shape[0]) < starts.shape[0] // 2).repeat_interleave(start.shape[-1])
            columns = (basis.transpose(-1, -2).flatten(1, 2) for basis in (start, end))
            residuals += [fitted_residual(source, target, fitted) for source, target in zip(*columns, strict=True)]
            continue
        origin, step = steps.double().unbind(dim=1)
        if bool((torch.linalg.matrix_rank(origin) < origin.shape[-1]).any()):
            return float("inf")
        move = step @ torch.linalg.inv(origin)
        moved, expected = move.unsqueeze(1) @ start.double(), end.double()
        residuals.append(float(((moved - expected).norm(dim=(-1, -2)) / expected.norm(dim=(-1, -2))).max()))
    return max(residuals)
