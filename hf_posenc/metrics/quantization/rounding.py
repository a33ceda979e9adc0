"""Numbers as a low-precision format holds them, kept in the dtype they came in."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {"int8": 8, "int4": 4}
FORMATS = (*FLOATS, *INTEGERS)


def rounded(
    values: Tensor, form: str, *, scale_over: tuple[int, ...] | None = None, counted: Tensor | None = None
) -> Tensor:
    """`values` as `form` holds them.

    Args:
        values: of any shape.
        form: one of `FORMATS`. Integers are symmetric: the largest magnitude is the largest integer, 127 or 7.
        scale_over: dimensions that share one integer scale; `None` for one scale of the whole tensor.
        counted: which values the scale of integers has to hold, `bool`, broadcast to `values`; the others are clamped.
            By default all are.
    """
    if form in FLOATS:
        largest = torch.finfo(FLOATS[form]).max
        # What float16 cannot hold is clamped: an infinite bias would be a mask.
        return values.clamp(-largest, largest).to(FLOATS[form]).to(values.dtype)
    steps = 2 ** (INTEGERS[form] - 1) - 1
    magnitudes = values.abs() if counted is None else values.abs().where(counted, 0.0)
    dims = tuple(range(values.dim())) if scale_over is None else scale_over
    scale = (magnitudes.amax(dim=dims, keepdim=True) / steps).clamp(min=torch.finfo(torch.float32).tiny)
    return ((values / scale).round().clamp(-steps, steps) * scale).to(values.dtype)


def rounded_ids(ids: Tensor, form: str) -> Tensor:
    """Position ids as `position_ids.to(dtype)` leaves them: bfloat16 has no 257, and float16 no 2049 and ends at 65504.

    Args:
        ids: int64, or float32 where a position map has made real numbers of them.
        form: a floating-point format of `FORMATS`.
    """
    dtype = FLOATS[form]
    largest = torch.finfo(dtype).max
    return ids.to(dtype).double().clamp(max=largest).to(ids.dtype)
