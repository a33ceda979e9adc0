"""Parameters that are clamped to a range when they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.schemes.weights import carries_more


class _Projected(torch.autograd.Function):
    """Clamped values, without the gradients that would move them further out of the range.

    The bounds are no arguments: with `dynamic=True`, torch.compile takes no Python numbers here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, clamped: Tensor) -> Tensor:
        return clamped.view_as(clamped)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, clamped = ctx.saved_tensors
        (gradient,) = gradients
        outward = ((values < clamped) & (gradient > 0)) | ((values > clamped) & (gradient < 0))
        return gradient.masked_fill(outward, 0.0), None


class _ProjectedForward(_Projected):
    """Also has the forward-mode derivative of a clamp. torch.compile takes no class with one."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        _Projected.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        values, clamped = ctx.saved_tensors
        return tangent.masked_fill(values != clamped, 0.0)


def projected(values: Tensor, minimum: float, maximum: float) -> Tensor:
    """Clamps `values` to `[minimum, maximum]` and keeps gradients that lead back into the range.

    A plain clamp has no gradient outside the range, so a parameter that leaves the range would never return. Here it
    receives all gradients except those that would move it further out.

    Args:
        values: of any shape.
        minimum: may be `-inf`.
        maximum: may be `inf`.
    """
    derived = carries_more()
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or derived):
        return values.clamp(minimum, maximum)
    kind = _Projected if torch.compiler.is_compiling() else _ProjectedForward
    result: Tensor = kind.apply(values, values.detach().clamp(minimum, maximum))
    return result
