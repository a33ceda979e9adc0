"""Least squares over the parameters of a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
