"""How far apart two representations are."""

from __future__ import annotations

from torch import Tensor


def relative_l2(first: Tensor, second: Tensor) -> float:
    """Length of the difference, in units of the mean length of the two: 0 for equal tensors, at most 2.

    Args:
        first: any shape; compared as one vector, in float64.
        second: the same shape.
    """
    first, second = first.detach().double().flatten(), second.detach().double().flatten()
    scale = (first.norm() + second.norm()) / 2
    return 0.0 if scale == 0 else float((first - second).norm() / scale)


def cosine_distance(first: Tensor, second: Tensor) -> float:
    """One minus the cosine of the angle: 0 for equal directions, 2 for opposite ones.

    Computed as half the squared distance of the unit vectors, which, unlike `1 - cos`, loses no digits where
    the two are close and is exactly 0 where they are equal.

    Args:
        first: any shape; compared as one vector, in float64.
        second: the same shape.
    """
    first, second = first.detach().double().flatten(), second.detach().double().flatten()
    lengths = first.norm(), second.norm()
    if lengths[0] == 0 or lengths[1] == 0:
        return 0.0 if lengths[0] == lengths[1] else 1.0
    return float((first / lengths[0] - second / lengths[1]).square().sum() / 2)
