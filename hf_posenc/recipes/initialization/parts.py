"""Fits the parts of a new scheme to the parts of the old scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_posenc.recipes.initialization.logits import LayerHeads, mean_logits, pair_counts
from hf_posenc.recipes.initialization.tables import extended_rows
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.arrangement.composed import SummedEncoding
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.parts import AdditiveEncoding, LogitBias, LogitScale, PairwiseBias, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs, Positions, integer_range

#: Maximum number of positions to fit a function of position at; more positions add no information.
_MOST_POSITIONS = 4096
#: Number of queries, evenly spaced in the sample, to fit a bias that is not a function of distance alone.
_COMPARED_QUERIES = 16


def is_trained(part: torch.nn.Module | None) -> bool:
    """Whether a part has parameters to fit."""
    return part is not None and any(parameter.requires_grad for parameter in part.parameters())


def is_fittable_bias(bias: LogitBias | None) -> bool:
    """Whether a bias has parameters and depends only on positions, not on queries or keys."""
    if not is_trained(bias):
        return False
    return not (isinstance(bias, PairwiseBias) and (bias.reads_heads or bias.num_features))


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
    length = old_positions if table is None else table.num_positions
    length = min(length, _MOST_POSITIONS) if table is None else length
    device = next(new.parameters()).device
    known = min(length, old_positions)
    with torch.no_grad():
        targets = _vectors(old, known, new, device)
        if length > known:
            targets = extended_rows(targets, length, extension or "linear")
        others = torch.zeros_like(targets) if table is None else _vectors_of_others(new, table, length, device)
        before = _mean_square(_vectors(new, length, new, device) - targets)
        size = _mean_square(targets)
        if table is not None:
            table.weight[table.offset :] = (targets - others).to(table.weight.dtype)
            _copy_padding_rows(table, old)
    if table is None:
        root = targets.numel() ** 0.5
        least_squares(new, lambda: (_vectors(new, length, new, device) - targets) / root, size)
    with torch.no_grad():
        missed = _mean_square(_vectors(new, length, new, device) - targets)
    target = "no vectors" if old is None else "the vectors added before"
    if length > known:
        target += f", {known} positions extended to {length} ({extension or 'linear'})"
    return Fit(where, target, relative(before, size), relative(missed, size), known)


def fit_scale(new: LogitScale, old: LogitScale | None, length: int, where: str) -> Fit:
    """Fits a learned logit scale to the old scale, or to 1 if there was none."""
    positions = _positions(min(length, _MOST_POSITIONS), next(new.parameters()).device)
    with torch.no_grad():
        targets = torch.ones_like(new(positions)) if old is None else old(positions).expand_as(new(positions)).clone()
        before, size = _mean_square(new(positions) - targets), _mean_square(targets)
    root = targets.numel() ** 0.5
    least_squares(new, lambda: (new(positions) - targets) / root, size)
    with torch.no_grad():
        missed = _mean_square(new(positions) - targets)
    target = "1 on average" if old is None else "the previous scale"
    return Fit(where, target, relative(before, size), relative(missed, size), positions.ids.shape[-1])


@dataclass
class BiasTarget:
    """The bias that restores the previous mean logits in one layer.

    Args:
        layer: index among all layers of the model.
        causal: whether queries see only keys at or before their own position.
        values: `(heads, distances)` float32, in the order of `mean_logits`.
        length: length of the sample.
    """

    layer: int
    causal: bool
    values: Tensor
    length: int
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts = pair_counts(self.length, self.causal).to(self.values.device)
        self.weights = counts / counts.sum()
        # A constant per head does not change the softmax.
        self.values = self.values - (self.values * self.weights).sum(-1, keepdim=True)


def bias_target(
    layer: int, causal: bool, old: SchemeParts, before: LayerHeads, new: SchemeParts, after: LayerHeads
) -> BiasTarget:
    """Computes the mean logits by distance of the old scheme minus those of the new scheme without its bias.

    Args:
        layer: index among all layers of the model.
        causal: whether queries see only keys at or before their own position.
        old: the old scheme's parts in this layer.
        before: heads recorded under the old scheme.
        new: the new scheme's parts in this layer; its bias is ignored.
        after: heads recorded under the new scheme, or the same heads.
    """
    unbiased = dataclasses.replace(new, logit_bias=None)
    values = mean_logits(old, before, causal) - mean_logits(unbiased, after, causal)
    return BiasTarget(layer, causal, values, before.query.shape[-2])


def fit_bias(new: LogitBias, targets: list[BiasTarget], where: str) -> Fit:
    """Fits a bias, over all pairs of the sample, to the mean target of the layers that share it.

    Args:
        new: a bias with parameters that depends only on positions.
        targets: targets of those layers.
        where: the name of the part, for the report.
    """
    causal, length = targets[0].causal, targets[0].length
    device = next(new.parameters()).device
    values = torch.stack([target.values for target in targets]).to(device)
    weights = targets[0].weights.to(device)
    own = _bias_by_pairs(new, length, causal, device) if isinstance(new, PairwiseBias) else None

    def missed() -> Tensor:
        if own is not None:
            return own(values, weights)
        distances = torch.arange(1 - length, 1 if causal else length, device=device)
        bias = new(distances)
        bias = bias - (bias * weights).sum(-1, keepdim=True)
        return (bias - values) * weights.sqrt() / (len(targets) * bias.shape[0]) ** 0.5

    size = float((values.square() * weights).sum(-1).mean())
    with torch.no_grad():
        before = float(missed().square().sum())
    least_squares(new, missed, size)
    with torch.no_grad():
        after = float(missed().square().sum())
    target = f"the mean logits by distance of {len(targets)} layer(s)"
    return Fit(where, target, relative(before, size), relative(after, size), length)


def _bias_by_pairs(
    bias: PairwiseBias, length: int, causal: bool, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Computes the residual of a bias that is not a function of distance alone, at some queries of a sequence."""
    slots = torch.linspace(0, length - 1, min(_COMPARED_QUERIES, length)).round().long().unique().to(device)
    nothing = torch.zeros(1, 1, length, 1, device=device)
    pairs = AttentionPairs(nothing[:, :, : len(slots)], nothing, slots, _positions(length, device), 1.0)
    distance = pairs.distance[0]
    visible = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)

    def missed(values: Tensor, weights: Tensor) -> Tensor:
        del weights  # Every pair has the same weight here.
        wanted = values[:, :, (distance + length - 1).clamp(max=values.shape[-1] - 1)]
        difference = pairwise_bias(bias, pairs) - wanted
        # `(layers, heads, pairs)`; the mean difference of a head does not change the softmax.
        difference = difference[:, :, visible]
        difference = difference - difference.mean(-1, keepdim=True)
        return difference / difference.numel() ** 0.5

    return missed


def _positions(length: int, device: torch.device) -> Positions:
    ids = integer_range(0, length, device)
    return Positions(ids, ids[:, -1:] + 1)


def _vectors(part: AdditiveEncoding | None, length: int, like: AdditiveEncoding, device: torch.device) -> Tensor:
    """`(length, hidden)` float32; zeros for no part."""
    if part is None:
        return torch.zeros_like(_vectors(like, length, like, device))
    vectors: Tensor = part(_positions(length, device))[0]
    return vectors.float()


def _table_in(part: AdditiveEncoding) -> LearnedEncoding | None:
    """Returns the only table of a part (the part itself or a summand), if nothing else in it is trained."""
    found = part.parts if isinstance(part, SummedEncoding) else [part]
    trained = [summand for summand in found if is_trained(summand)]
    only = trained[0] if len(trained) == 1 else None
    return only if isinstance(only, LearnedEncoding) else None


def _vectors_of_others(part: AdditiveEncoding, table: LearnedEncoding, length: int, device: torch.device) -> Tensor:
    return _vectors(part, length, part, device) - _vectors(table, length, table, device)


def _copy_padding_rows(table: LearnedEncoding, old: AdditiveEncoding | None) -> None:
    source = next((module for module in old.modules() if isinstance(module, LearnedEncoding)), None) if old else None
    if source is not None and source.offset == table.offset:
        table.weight[: table.offset] = source.weight[: table.offset].to(table.weight.dtype)


def _mean_square(difference: Tensor) -> float:
    return float(difference.float().square().mean())


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


def least_squares(part: nn.Module, missed: Callable[[], Tensor], size: float, max_iterations: int = 200) -> None:
    """Fits the trained parameters of a part by least squares (L-BFGS).

    Args:
        part: the part to fit. Its parameters are fitted in float32 and keep their dtype.
        missed: computes the differences from the target, in any shape, multiplied by the square roots of their weights.
        size: mean square of the target.
        max_iterations: maximum number of L-BFGS iterations.
    """
    parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
    dtypes = [parameter.dtype for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    starts = [parameter.detach().clone() for parameter in parameters]
    scale = max(size, torch.finfo(torch.float32).tiny)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=max_iterations, line_search_fn="strong_wolfe", tolerance_grad=1e-7, tolerance_change=1e-10
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        moved = sum((((p - start) ** 2).mean() for p, start in zip(parameters, starts, strict=True)), start=_zero())
        loss = missed().square().sum() / scale + _RIDGE * moved
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)


def relative(missed: float, size: float) -> float | None:
    """Returns the root mean square relative to that of the target; `None` if the target is zero."""
    return None if size <= 0 else float((missed / size) ** 0.5)


def _zero() -> Tensor:
    return torch.zeros(())
