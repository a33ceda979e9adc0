"""The rotation kernel of all rotary maps, and its factors.

A rotation of pairs is `x * own + partner(x) * other`: `partner` exchanges the two dimensions of each pair, and `other`
is the sine with the appropriate sign for each of them. In eager torch, most of the cost is reading and writing memory
in each of these steps, and allocating intermediate results as large as the heads. The kernel here allocates only the
result, fills it in pieces that fit into the processor cache, and implements its backward pass: the inverse rotation,
for which `x` does not need to be saved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posenc.schemes.parts import DeviceConstant
from hf_posenc.schemes.weights import carries_more, traced

#: Bytes of the heads that one core rotates at a time. With the result and the exchanged pairs this takes 3 MiB. Larger
#: pieces gain nothing, because allocations of that size are cached; smaller ones cost more calls.
_PIECE_BYTES = 2**20
#: Up to this many numbers (a decoding step), calls cost more than memory accesses.
_FEW = 2**15
#: Dtypes for which complex arithmetic in torch is as fast as real arithmetic.
_COMPLEX_DTYPES = (torch.float32, torch.float64)


class RotationFactors(NamedTuple):
    """The factors of a rotation, in the dtype of the heads.

    Args:
        direct: `(batch or 1, heads or 1, length, rotary_dim)`, the factor of the dimension itself: the cosine. If
            `other` is `None`, the complex number `cosine + i sine` of each pair, `(batch or 1, heads or 1, length,
            rotary_dim / 2)`.
        other: the factor of the other dimension of the pair: the sine, with the sign of the direction; or `None`.
    """

    direct: Tensor
    other: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> RotationFactors:
        """Both factors, changed by a function."""
        return RotationFactors(change(self.direct), None if self.other is None else change(self.other))


def for_both_of_pair(values: Tensor, layout: str) -> Tensor:
    """Repeats a value per pair, `(..., rotary_dim / 2)`, for both dimensions of the pair, `(..., rotary_dim)`."""
    return values.repeat_interleave(2, dim=-1) if layout == "interleaved" else torch.cat((values, values), dim=-1)


def rotation_factors(cosine: Tensor, sine: Tensor, layout: str, dtype: torch.dtype) -> RotationFactors:
    """Computes the factors of a rotation.

    Args:
        cosine: `(batch or 1, length, rotary_dim)`, or `(batch or 1, length, key_value_heads, rotary_dim)` if heads
            differ; the same for both dimensions of a pair.
        sine: the sine, in the same shape.
        layout: "half", "half_reversed" or "interleaved", as in `RotaryMap`.
        dtype: dtype of the heads. Cosine, sine and each product are rounded to it, so the result is bit-equal to the
            expression in transformers.
    """
    plain = not traced() and type(sine) is Tensor
    # On a CPU, complex numbers need more calls for one token. On other devices they need one kernel instead of four.
    real = layout != "interleaved" or dtype not in _COMPLEX_DTYPES or (cosine.is_cpu and cosine.shape[1] == 1)
    if plain and real:
        other = sine * _signs(layout, sine.shape[-1]).on(sine.device)
        return RotationFactors(with_heads_axis(cosine.to(dtype)), with_heads_axis(other.to(dtype)))
    cosine, sine = cosine.to(dtype), sine.to(dtype)
    if layout == "interleaved" and dtype in _COMPLEX_DTYPES and not traced():
        return RotationFactors(with_heads_axis(torch.complex(cosine[..., ::2], sine[..., ::2])), None)
    cosine, sine = with_heads_axis(cosine), with_heads_axis(sine)
    if layout == "interleaved":
        pairs = torch.unflatten(sine, -1, (-1, 2))
        return RotationFactors(cosine, torch.stack((-pairs[..., 0], pairs[..., 1]), dim=-1).flatten(-2))
    first, second = sine.chunk(2, dim=-1)
    return RotationFactors(cosine, torch.cat((-first, second) if layout == "half" else (first, -second), dim=-1))


@functools.cache
def _signs(layout: str, width: int) -> DeviceConstant:
    """`(width,)`: the sign of the sine of each dimension."""
    first, half = torch.arange(width, device="cpu"), width // 2
    minus = {"interleaved": first % 2 == 0, "half": first < half, "half_reversed": first >= half}[layout]
    return DeviceConstant(1.0 - 2.0 * minus.float())


@functools.cache
def _neighbours(width: int) -> DeviceConstant:
    """`(width,)` int64: the other dimension of each pair of neighbours."""
    return DeviceConstant(torch.arange(width, device="cpu").view(-1, 2).flip(-1).flatten())


def factors_of_angles(angles: Tensor, layout: str, dtype: torch.dtype) -> RotationFactors:
    """Computes the factors from the angle of each pair, `(batch or 1, heads or 1, length, rotary_dim / 2)`."""
    if layout == "interleaved":
        both = for_both_of_pair(angles.transpose(1, 2), layout)
        return rotation_factors(both.cos(), both.sin(), layout, dtype)
    if takes_signed_angles(2 * angles.numel()):
        return factors_of_signed_angles(signed_for_both_of_pair(angles, layout), dtype)
    # More operators, but half as many cosines and sines.
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    other = (-sine, sine) if layout == "half" else (sine, -sine)
    return RotationFactors(torch.cat((cosine, cosine), dim=-1), torch.cat(other, dim=-1))


def takes_signed_angles(count: int) -> bool:
    """Whether factors are computed from this number of signed angles, and not from one angle per pair."""
    return traced() or count <= 2 * _FEW


def signed_for_both_of_pair(values: Tensor, layout: str) -> Tensor:
    """A value per pair, `(..., rotary_dim / 2)`, for both dimensions, with the sign of the sine; not "interleaved"."""
    return torch.cat((-values, values) if layout == "half" else (values, -values), dim=-1)


def factors_of_signed_angles(angles: Tensor, dtype: torch.dtype) -> RotationFactors:
    """Computes the factors from `signed_for_both_of_pair` of angles, `(batch or 1, heads or 1, length, rotary_dim)`."""
    return RotationFactors(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotation(x: Tensor, factors: RotationFactors, layout: str) -> Tensor:
    """Rotates the first dimensions of `x` `(batch, heads, length, head_dim)`; the rest are not changed.

    Args:
        x: queries or keys. It is not modified, and not saved for the backward pass.
        factors: as `rotation_factors` returns them, in the dtype of `x`.
        layout: the layout they were made for.
    """
    direct, other = factors
    heads, width = direct.shape[1], direct.shape[-1]
    if other is not None and x.numel() <= _FEW and heads in (1, x.shape[1]) and width == x.shape[-1]:
        # Nearly every decoding step takes this path, where the overhead of each call matters.
        if layout != "interleaved":
            partner = x.roll(width // 2, -1)
        elif torch.is_grad_enabled() or traced() or type(x) is not Tensor:
            partner = _partner(x, layout)
        else:
            partner = x.index_select(-1, _neighbours(width).on(x.device))
        if heads == 1 or torch.is_grad_enabled():
            return x * direct + partner * other
        # No stock model has factors per head, which might be rounded otherwise. The gradient would take more operators.
        return torch.addcmul(x * direct, partner, other)
    if x.shape[-2] == 1 and heads not in (1, x.shape[1]) and not traced():
        # One token: its query heads take the place of tokens of their key head.
        return apply_rotation(x.reshape(x.shape[0], heads, -1, x.shape[-1]), factors, layout).view(x.shape)
    if heads not in (1, x.shape[1]):  # Factors of key heads are those of their query heads.
        factors = factors.each(lambda factor: factor.repeat_interleave(x.shape[1] // heads, dim=1))
    if x.numel() <= _FEW or _needs_plain_torch(x, factors):
        return _rotated_without_kernel(x, factors, layout)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, *factors, layout, None)
    return _kernel(x, factors, layout)


def _needs_plain_torch(x: Tensor, factors: RotationFactors) -> bool:
    """Whether single torch operations are needed: for compilers, gradients of the factors, and other derivatives."""
    if traced() or carries_more():
        return True
    return type(x) is not Tensor or (torch.is_grad_enabled() and factors.direct.requires_grad)


def _rotated_without_kernel(x: Tensor, factors: RotationFactors, layout: str) -> Tensor:
    """The rotation as one torch expression, which torch can differentiate and fuse."""
    direct, other = factors
    width = direct.shape[-1] if other is not None else 2 * direct.shape[-1]
    rotated = x if width == x.shape[-1] else x[..., :width]
    if other is None:
        rotated = torch.view_as_real(_as_complex(rotated) * direct).flatten(-2)
    elif direct.shape[1] == 1:
        rotated = rotated * direct + _partner(rotated, layout) * other
    else:
        rotated = torch.addcmul(rotated * direct, _partner(rotated, layout), other)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def _kernel(x: Tensor, factors: RotationFactors, layout: str, strides: tuple[int, ...] | None = None) -> Tensor:
    """The result of `apply_rotation` without autograd, with the memory layout of `x` or with `strides`."""
    direct, other = factors
    width = direct.shape[-1] * (2 if other is None else 1)
    if strides is None and width == x.shape[-1]:
        if other is None:
            return torch.view_as_real(_as_complex(x) * direct).flatten(-2)
        if x.numel() * x.element_size() <= _piece_bytes(x):
            return (x * direct).add_(_partner(x, layout).mul_(other))
    if strides is None:
        out = torch.empty_like(x)
    else:
        out = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    turning, place = x, out
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
        turning, place = x[..., :width], out[..., :width]
    if other is None:
        target = torch.view_as_complex(torch.unflatten(place, -1, (-1, 2))) if _is_complex(place) else None
        product = torch.mul(_as_complex(turning), direct, out=target)
        if target is None:
            place.copy_(torch.view_as_real(product).flatten(-2))
        return out
    pieces = -(-turning.numel() * turning.element_size() // _piece_bytes(x))
    length = max(1, -(-x.shape[-2] // max(pieces, 1)))
    for part, part_place, part_own, part_other in zip(
        *(tensor.split(length, dim=-2) for tensor in (turning, place, direct, other)), strict=True
    ):
        torch.mul(part, part_own, out=part_place)
        part_place.add_(_partner(part, layout).mul_(part_other))
    return out


def _piece_bytes(x: Tensor) -> int:
    """Returns the bytes to rotate at a time. Pieces are only useful on CPUs, because of their caches."""
    return _PIECE_BYTES * torch.get_num_threads() if x.device.type == "cpu" else 2**62


def _partner(x: Tensor, layout: str) -> Tensor:
    """Returns a new tensor in which the two dimensions of each pair are exchanged."""
    if layout == "interleaved":
        return torch.unflatten(x, -1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


def _as_complex(x: Tensor) -> Tensor:
    """Views each pair of adjacent dimensions as a complex number, or copies if the memory layout requires it."""
    pairs = torch.unflatten(x, -1, (-1, 2))
    return torch.view_as_complex(pairs if _is_complex(x) else pairs.contiguous())


def _is_complex(x: Tensor) -> bool:
    """Whether adjacent dimensions have the memory layout of complex numbers."""
    *outer, last = x.stride()
    return last == 1 and math.gcd(2, x.storage_offset(), *outer) == 2


def with_heads_axis(phase: Tensor) -> Tensor:
    """Reshapes phases, with or without an axis of heads, to `(batch or 1, heads or 1, length, width)`."""
    return phase.unsqueeze(1) if phase.ndim == 3 else phase.transpose(1, 2)


class _Rotation(torch.autograd.Function):
    """The kernel with its backward pass, which is the transposed rotation and can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, direct: Tensor, other: Tensor | None, layout: str, strides: tuple[int, ...] | None
    ) -> Tensor:
        """Like `apply_rotation`, with the `strides` of the result."""
        ctx.save_for_backward(direct, other)
        ctx.layout = layout
        out = _kernel(x, RotationFactors(direct, other), layout, strides)
        ctx.strides = out.stride()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Returns the gradient of `x` in the memory layout of the result, which the producer of `x` expects."""
        direct, other = ctx.saved_tensors
        if other is None:
            direct = direct.conj()
        else:
            other = _partner(other, ctx.layout)
        back = _Rotation.apply(*gradients, direct, other, ctx.layout, ctx.strides)
        return back, None, None, None, None
