"""Parameters that are clamped to a range when they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes.weights import carries_more


class _Projected(torch.autograd.Function):
    """Clamps values, and drops only the gradients that would move them further out of the range."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, minimum: float, maximum: float) -> Tensor:
        return values.clamp(minimum, maximum)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        values, ctx.minimum, ctx.maximum = inputs
        ctx.save_for_backward(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        (gradient,) = gradients
        outward = ((values < ctx.minimum) & (gradient > 0)) | ((values > ctx.maximum) & (gradient < 0))
        return gradient.masked_fill(outward, 0.0), None, None


class _ProjectedForward(_Projected):
    """Also has the forward-mode derivative of a clamp. torch.compile takes no class with one."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        _Projected.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (values,) = ctx.saved_tensors
        return tangent.masked_fill((values < ctx.minimum) | (values > ctx.maximum), 0.0)


def projected(values: Tensor, minimum: float, maximum: float) -> Tensor:
    """Clamps `values` to `[minimum, maximum]` and keeps gradients that lead back into the range.

    A plain clamp has no gradient outside the range, so a parameter that leaves the range would never return. Here it
    receives all gradients except those that would move it further out.

    Args:
        values: of any shape.
        minimum: may be `-inf`.
        maximum: may be `inf`.
    """
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or carries_more()):
        return values.clamp(minimum, maximum)
    kind = _Projected if torch.compiler.is_compiling() else _ProjectedForward
    result: Tensor = kind.apply(values, minimum, maximum)
    return result
