"""The parts of a new scheme, each fitted to what the old scheme did in its place."""

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

#: A fitted function of position is compared at no more positions than this; beyond it the targets repeat themselves.
_MOST_POSITIONS = 4096
#: A bias that is no function of distance alone is compared at this many queries, evenly spread over the sample.
_COMPARED_QUERIES = 16


def is_trained(part: torch.nn.Module | None) -> bool:
    """Whether a part has parameters to fit."""
    return part is not None and any(parameter.requires_grad for parameter in part.parameters())


def is_fittable_bias(bias: LogitBias | None) -> bool:
    """Whether a bias has parameters and goes by positions alone: one that reads queries or keys has no mean."""
    if not is_trained(bias):
        return False
    return not (isinstance(bias, PairwiseBias) and (bias.reads_heads or bias.num_features))


def fit_additive(
    new: AdditiveEncoding, old: AdditiveEncoding | None, old_positions: int, extension: str | None, where: str
) -> Fit:
    """Gives a learned encoding the vectors that were added before; zeros where nothing was.

    Args:
        new: with parameters.
        old: in force before, or `None`.
        old_positions: how many positions the old one has vectors for.
        extension: how a table continues past them, one of `TABLE_EXTENSIONS`; `None` for "linear".
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
    """Gives a learned logit scale the size of the old one, which is 1 where there was none."""
    positions = _positions(min(length, _MOST_POSITIONS), next(new.parameters()).device)
    with torch.no_grad():
        targets = torch.ones_like(new(positions)) if old is None else old(positions).expand_as(new(positions)).clone()
        before, size = _mean_square(new(positions) - targets), _mean_square(targets)
    root = targets.numel() ** 0.5
    least_squares(new, lambda: (new(positions) - targets) / root, size)
    with torch.no_grad():
        missed = _mean_square(new(positions) - targets)
    target = "1 on average" if old is None else "the scale in force before"
    return Fit(where, target, relative(before, size), relative(missed, size), positions.ids.shape[-1])


@dataclass
class BiasTarget:
    """What a bias has to add in one layer for its logits to be, on average, those before.

    Args:
        layer: index among all layers of the model.
        causal: whether queries see only keys at or before their own position.
        values: `(heads, distances)` float32, in the order of `mean_logits`.
        length: of the sample.
    """

    layer: int
    causal: bool
    values: Tensor
    length: int
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts = pair_counts(self.length, self.causal).to(self.values.device)
        self.weights = counts / counts.sum()
        # A constant per head changes no softmax.
        self.values = self.values - (self.values * self.weights).sum(-1, keepdim=True)


def bias_target(
    layer: int, causal: bool, old: SchemeParts, before: LayerHeads, new: SchemeParts, after: LayerHeads
) -> BiasTarget:
    """The difference of the mean logits by distance: of the old scheme, and of the new one without its bias.

    Args:
        layer: index among all layers of the model.
        causal: whether queries see only keys at or before their own position.
        old: the old scheme's parts in this layer.
        before: heads recorded under the old scheme.
        new: the new scheme's parts in this layer; its bias is left out.
        after: heads recorded under the new one, or the same.
    """
    unbiased = dataclasses.replace(new, logit_bias=None)
    values = mean_logits(old, before, causal) - mean_logits(unbiased, after, causal)
    return BiasTarget(layer, causal, values, before.query.shape[-2])


def fit_bias(new: LogitBias, targets: list[BiasTarget], where: str) -> Fit:
    """Fits a bias, over all pairs of the sample, to the mean of what the layers that share it need.

    Args:
        new: with parameters, and a function of positions alone.
        targets: of those layers.
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
    """What a bias that is no function of distance alone misses, at some queries of a sequence."""
    slots = torch.linspace(0, length - 1, min(_COMPARED_QUERIES, length)).round().long().unique().to(device)
    nothing = torch.zeros(1, 1, length, 1, device=device)
    pairs = AttentionPairs(nothing[:, :, : len(slots)], nothing, slots, _positions(length, device), 1.0)
    distance = pairs.distance[0]
    visible = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)

    def missed(values: Tensor, weights: Tensor) -> Tensor:
        del weights  # Every pair counts once here.
        wanted = values[:, :, (distance + length - 1).clamp(max=values.shape[-1] - 1)]
        difference = pairwise_bias(bias, pairs) - wanted
        # `(layers, heads, pairs)`; the mean difference of a head changes no softmax.
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
    """The one table of a part, itself or a summand of it, if nothing else in it is trained."""
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


#: Share of the fitted function's own size that a parameter pays for leaving its start by one. It decides nothing but
#: what the targets leave open: a slope that would go to minus infinity as a logarithm stays where it can be trained.
_RIDGE = 1e-4


@dataclass(frozen=True)
class Fit:
    """How near a part of the new scheme starts to what the old scheme did.

    Args:
        where: the part, for example "logit_bias of layers 0-5".
        target: what it was fitted to.
        residual_before: root mean square of what the default start misses, relative to that of the target; `None`
            where the target is zero.
        residual: the same after the fit; 0 is exact.
        covers: how many positions or distances the target was known for.
    """

    where: str
    target: str
    residual_before: float | None
    residual: float | None
    covers: int


def least_squares(part: nn.Module, missed: Callable[[], Tensor], size: float, max_iterations: int = 200) -> None:
    """Moves the trained parameters of a part until the mean square of what it misses is least (L-BFGS).

    Args:
        part: its parameters are fitted in float32 and keep their dtype.
        missed: computes the differences from the target, any shape, already multiplied with the roots of their weights.
        size: mean square of the target.
        max_iterations: of L-BFGS.
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
    """Root of a mean square relative to that of the target; `None` for a target of zero."""
    return None if size <= 0 else float((missed / size) ** 0.5)


def _zero() -> Tensor:
    return torch.zeros(())
