"""Fits the parts of a new scheme to the parts of the old scheme."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posenc.installation import require
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.outer_parts import SummedEncoding
from hf_posenc.schemes.parts import AdditiveEncoding, LogitBias, LogitScale, PairwiseBias
from hf_posenc.schemes.positions import AttentionPairs, Positions, integer_range

#: Methods to extend a table past the positions of the old scheme.
TABLE_EXTENSIONS = ("linear", "long_clip", "spline", "repeat", "last")
#: Rows that Long-CLIP keeps: the positions that CLIP has learned well (arXiv:2403.15378, section 3.2).
_KEPT_ROWS = 20
#: Maximum number of positions to fit a function of position at; more positions add no information.
_MOST_POSITIONS = 4096
#: Number of queries, evenly spaced in the sample, to fit a bias that is not a function of distance alone.
_COMPARED_QUERIES = 16
#: Weight of the penalty for moving a parameter away from its initial value, relative to the size of the target. It only
#: matters for parameters that the targets do not determine: a log slope that would go to minus infinity stays in a
#: trainable range.
_RIDGE = 1e-4


@dataclass(frozen=True)
class Fit:
    """The quality of the fit of one part.

    Args:
        where: the part, for example "logit_bias of layers 0-5".
        target: description of the fitted target.
        residual_before: root mean square of the residual with the default initialization, relative to that of the
            target; `None` if the target is zero.
        residual: the relative residual after the fit; 0 is exact.
        covers: number of positions or distances with a known target.
    """

    where: str
    target: str
    residual_before: float | None
    residual: float | None
    covers: int


def is_trained(part: nn.Module | None) -> bool:
    """Whether a part has parameters to fit."""
    return part is not None and any(parameter.requires_grad for parameter in part.parameters())


def is_fittable_bias(part: nn.Module | None) -> bool:
    """Whether a part is a bias with parameters that depends only on positions, not on queries or keys."""
    if not isinstance(part, LogitBias) or not is_trained(part):
        return False
    return not (isinstance(part, PairwiseBias) and (part.reads_heads or part.num_features))


def fit_additive(
    new: AdditiveEncoding, old: AdditiveEncoding | None, old_positions: int, extension: str | None, where: str
) -> Fit:
    """Fits a learned encoding to the vectors that were added before, or to zeros.

    Args:
        new: the new part, with parameters.
        old: the previous part, or `None`.
        old_positions: number of positions that the old part has vectors for.
        extension: how a table is extended, one of `TABLE_EXTENSIONS`; `None` for "linear".
        where: the name of the part, for the report.
    """
    table = _table_in(new)
    length = min(old_positions, _MOST_POSITIONS) if table is None else table.num_positions
    known = min(length, old_positions)
    target = "no vectors" if old is None else "the vectors added before"
    with torch.no_grad():
        like = _vectors(new, length)
        targets = torch.zeros_like(like[:known]) if old is None else _vectors(old, known, like.device)
        if length > known:
            targets = extended_rows(targets, length, extension or "linear")
            target += f", {known} positions extended to {length} ({extension or 'linear'})"

    def missed() -> Tensor:
        return (_vectors(new, length) - targets) / targets.numel() ** 0.5

    def fill() -> None:
        assert table is not None
        with torch.no_grad():
            others = _vectors(new, length) - _vectors(table, length)
            table.weight[table.offset :] = (targets - others).to(table.weight.dtype)
            for source in old.modules() if old is not None else ():
                if isinstance(source, LearnedEncoding) and source.offset == table.offset:
                    table.weight[: table.offset] = source.weight[: table.offset].to(table.weight.dtype)
                    break

    return _fitted(new, missed, _mean_square(targets), where, target, known, None if table is None else fill)


def extended_rows(rows: Tensor, num_positions: int, extension: str) -> Tensor:
    """Extends a table to more positions.

    - "linear": the old rows are spread evenly over all positions, with linear interpolation in between (position
      interpolation, arXiv:2306.15595, for tables). Adjacent rows become more similar, and short inputs get other rows
      than before.
    - "long_clip": the first 20 rows stay, and only the others are spread, past the last row along its difference to
      the row before (knowledge-preserved stretching, arXiv:2403.15378, section 3.2). 77 rows become 248 with a factor
      of 4. Short inputs get the same rows as before.
    - "spline": "linear" with a natural cubic spline; needs scipy.
    - "repeat": position p gets the row of `p % old_positions`, as in Longformer's conversion (arXiv:2004.05150, section
      5). The first rows do not change, so the results for short inputs do not change either.
    - "last": all positions past the old rows share the last row, as in PreSumm.

    Args:
        rows: `(old_positions, hidden)`.
        num_positions: number of positions of the new table, at least `old_positions`.
        extension: one of `TABLE_EXTENSIONS`.

    Returns:
        `(num_positions, hidden)` float32.

    Raises:
        ValueError: for a table that is too short for "long_clip".
    """
    rows, old = rows.float(), rows.shape[0]
    kept = _KEPT_ROWS if extension == "long_clip" else 0
    if kept and old < kept + 2:
        raise ValueError(
            f"table_extension='long_clip' keeps the first {kept} rows and stretches the others, but the table has only "
            f"{old}. Use 'linear' or 'repeat'."
        )
    places = torch.arange(num_positions, device=rows.device, dtype=torch.float64)
    # Where each new position is in the old table.
    along = {
        "long_clip": places.where(places < kept, kept + (places - kept) * (old - kept) / max(num_positions - kept, 1)),
        "repeat": places % old,
        "last": places.clamp(max=old - 1),
    }.get(extension, places * (old - 1) / max(num_positions - 1, 1))
    if extension == "spline" and old > 2:
        require("extension='spline'", "scipy")
        from scipy.interpolate import CubicSpline

        spline = CubicSpline(range(old), rows.double().cpu().numpy(), bc_type="natural")
        return torch.from_numpy(spline(along.cpu().numpy())).to(rows)
    low = along.floor().long().clamp(max=max(old - 2, 0))
    fraction = (along - low).unsqueeze(-1).to(rows.dtype)
    return rows[low] * (1 - fraction) + rows[(low + 1).clamp(max=old - 1)] * fraction


def fit_scale(new: LogitScale, old: LogitScale | None, length: int, where: str) -> Fit:
    """Fits a learned logit scale to the old scale, or to 1 if there was none."""
    positions = _positions(min(length, _MOST_POSITIONS), next(new.parameters()).device)
    with torch.no_grad():
        targets = torch.ones_like(new(positions)) if old is None else old(positions).expand_as(new(positions)).clone()
    target = "1 on average" if old is None else "the previous scale"

    def missed() -> Tensor:
        return (new(positions) - targets) / targets.numel() ** 0.5

    return _fitted(new, missed, _mean_square(targets), where, target, positions.ids.shape[-1])


def fit_bias(new: LogitBias, targets: list[Tensor], length: int, where: str) -> Fit:
    """Fits a bias, over all pairs of a sample, to the mean target of the layers that share it.

    Args:
        new: a bias with parameters that depends only on positions.
        targets: `(heads, distances)` for each of those layers, in the order of `mean_logits`: the bias that restores
            the previous mean logits.
        length: of the sample, in tokens.
        where: the name of the part, for the report.
    """
    device = next(new.parameters()).device
    causal = targets[0].shape[-1] == length
    past = torch.arange(1, length + 1, device=device).float()
    counts = past if causal else torch.cat((past, past[:-1].flip(0)))  # pairs of one sequence at each distance
    weights = counts / counts.sum()
    values = _centred(torch.stack(targets).to(device), weights)
    distances = torch.arange(1 - length, 1 if causal else length, device=device)

    def missed() -> Tensor:
        bias = _centred(new(distances), weights)
        return (bias - values) * weights.sqrt() / (len(targets) * bias.shape[0]) ** 0.5

    if isinstance(new, PairwiseBias):
        # Not a function of distance alone: compared at some queries of a sequence, where every pair weighs the same.
        slots = torch.linspace(0, length - 1, min(_COMPARED_QUERIES, length)).round().long().unique().to(device)
        nothing = torch.zeros(1, 1, length, 1, device=device)
        pairs = AttentionPairs(nothing[:, :, : len(slots)], nothing, slots, _positions(length, device), 1.0)
        distance = pairs.distance[0]
        visible = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
        wanted = values[:, :, (distance + length - 1).clamp(max=values.shape[-1] - 1)]

        def missed() -> Tensor:
            difference = (pairwise_bias(new, pairs) - wanted)[:, :, visible]
            difference = difference - difference.mean(-1, keepdim=True)
            return difference / difference.numel() ** 0.5

    size = float((values.square() * weights).sum(-1).mean())
    target = f"the mean logits by distance of {len(targets)} layer(s)"
    return _fitted(new, missed, size, where, target, length)


def _centred(values: Tensor, weights: Tensor) -> Tensor:
    """Without the mean of each head, which does not change the softmax."""
    return values - (values * weights).sum(-1, keepdim=True)


def _fitted(
    part: nn.Module,
    missed: Callable[[], Tensor],
    size: float,
    where: str,
    target: str,
    covers: int,
    fill: Callable[[], None] | None = None,
) -> Fit:
    """Fits a part and compares the residuals before and after.

    `missed` computes the differences from the target, in any shape, multiplied by the square roots of their weights,
    and `size` is the mean square of the target. `fill` sets the parameters to the solution, if it is known; otherwise
    they are fitted by least squares.
    """

    def residual() -> float | None:
        with torch.no_grad():
            return None if size <= 0 else (float(missed().square().sum()) / size) ** 0.5

    before = residual()
    _least_squares(part, missed, size) if fill is None else fill()
    return Fit(where, target, before, residual(), covers)


def _least_squares(part: nn.Module, missed: Callable[[], Tensor], size: float) -> None:
    """Fits the trained parameters of a part with L-BFGS, in float32; they keep their dtype.

    A step may lead to values that are not numbers, such as the exponential of a large slope. The parameters are those
    with the smallest loss that was seen, which are the initial ones at worst.
    """
    parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
    dtypes = [parameter.dtype for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    starts = [parameter.detach().clone() for parameter in parameters]
    scale = max(size, torch.finfo(torch.float32).tiny)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-7, tolerance_change=1e-10
    )

    best, smallest = starts, math.inf

    def closure() -> Tensor:
        nonlocal best, smallest
        optimizer.zero_grad()
        moved = sum(((p - start).square().mean() for p, start in zip(parameters, starts, strict=True)), torch.zeros(()))
        loss = missed().square().sum() / scale + _RIDGE * moved
        loss.backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not all(bool(number.isfinite().all()) for number in (loss, *gradients)):
            # A high plateau, from which the line search turns back.
            for gradient in gradients:
                gradient.zero_()
            return torch.full_like(loss, 10 * (smallest + 1) if smallest < math.inf else 1.0)
        if (value := float(loss.detach())) < smallest:
            best, smallest = [parameter.detach().clone() for parameter in parameters], value
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    for parameter, solution, dtype in zip(parameters, best, dtypes, strict=True):
        parameter.grad = None
        parameter.data = solution.to(dtype)


def _positions(length: int, device: torch.device) -> Positions:
    ids = integer_range(0, length, device)
    return Positions(ids, ids[:, -1:] + 1)


def _vectors(part: AdditiveEncoding, length: int, device: torch.device | None = None) -> Tensor:
    """`(length, hidden)` float32; on the device of the part's parameters unless given."""
    vectors: Tensor = part(_positions(length, device or next(part.parameters()).device))[0]
    return vectors.float()


def _table_in(part: AdditiveEncoding) -> LearnedEncoding | None:
    """Returns the only table of a part (the part itself or a summand), if nothing else in it is trained."""
    summands = part.members() if isinstance(part, SummedEncoding) and part.plain else [part]
    trained = [summand for summand in summands if is_trained(summand)]
    only = trained[0] if len(trained) == 1 else None
    return only if isinstance(only, LearnedEncoding) else None


def _mean_square(values: Tensor) -> float:
    return float(values.float().square().mean())
