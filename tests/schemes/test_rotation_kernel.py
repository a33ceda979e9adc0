"""The rotation kernel against its definition, `x * cosine + quarter_turn(x) * sine`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_posenc.schemes.positions import Positions, integer_range
from hf_posenc.schemes.rotary import rotation_kernel
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.rotation_kernel import apply_rotation, factors_of_angles, rotation_factors

LAYOUTS = ("half", "half_reversed", "interleaved")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def reference(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, layout: str) -> torch.Tensor:
    """As the papers write it, pair by pair; cosine and sine `(batch or 1, length, width)`."""
    width = cosine.shape[-1]
    cosine, sine = cosine.unsqueeze(1).to(x.dtype), sine.unsqueeze(1).to(x.dtype)
    first = list(range(0, width, 2)) if layout == "interleaved" else list(range(width // 2))
    second = list(range(1, width, 2)) if layout == "interleaved" else list(range(width // 2, width))
    if layout == "half_reversed":
        sine = -sine
    columns = list(x.unbind(-1))
    for dimension, other in zip(first, second, strict=True):
        a, b = x[..., dimension], x[..., other]
        columns[dimension] = a * cosine[..., dimension] + -b * sine[..., dimension]
        columns[other] = b * cosine[..., other] + a * sine[..., other]
    return torch.stack(columns, dim=-1)


def phases_of(width: int, length: int, layout: str, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    part = RotaryMap(torch.rand(width // 2) + 0.1, layout, attention_scaling=1.25)
    ids = integer_range(3, length) * torch.arange(1, batch + 1).unsqueeze(-1)
    cosine, sine = part.phases(Positions(ids, ids[:, -1:] + 1))
    return cosine, sine


def heads_of(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> torch.Tensor:
    """`(batch, heads, length, head_dim)` as models have it in memory."""
    batch, heads, length, width = shape
    if memory == "contiguous":
        return torch.randn(shape).to(dtype)
    if memory == "transposed":
        return torch.randn(batch, length, heads, width).to(dtype).transpose(1, 2)
    if memory == "joined":  # queries cut out of one projection of queries, keys and values
        return torch.randn(batch, length, heads, 3 * width).to(dtype)[..., width : 2 * width].transpose(1, 2)
    if memory == "shifted":  # an odd offset and odd strides, which no complex number has
        return torch.randn(batch, length, heads, width + 1).to(dtype)[..., 1:].transpose(1, 2)
    assert memory == "repeated"  # one key for all heads
    return torch.randn(batch, 1, length, width).to(dtype).expand(shape)


MEMORIES = ("contiguous", "transposed", "joined", "shifted", "repeated")


def tolerance(layout: str, dtype: torch.dtype) -> float:
    """Bit for bit, but for complex products: a processor may fuse one of their roundings away (2 ulp of 8)."""
    return 16 * torch.finfo(dtype).eps if layout == "interleaved" and dtype in (torch.float32, torch.float64) else 0.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    memory=st.sampled_from(MEMORIES),
    width=st.sampled_from([2, 4, 8]),
    rest=st.sampled_from([0, 1, 4]),
    length=st.integers(1, 9),
    batch=st.integers(1, 2),
    piece_bytes=st.sampled_from([1, 200, 2**20]),
    few=st.sampled_from([0, 2**15]),
    own_positions=st.booleans(),
)
def test_values_and_gradients(layout, dtype, memory, width, rest, length, batch, piece_bytes, few, own_positions):
    torch.manual_seed(0)
    cosine, sine = phases_of(width, length, layout, batch if own_positions else 1)
    x = heads_of((batch, 3, length, width + rest), memory, dtype)
    before = x.clone()
    expected_from, leaf = x.clone().requires_grad_(), x.detach().requires_grad_()
    expected = reference(expected_from, cosine, sine, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation_kernel, "_PIECE_BYTES", piece_bytes)
        patch.setattr(rotation_kernel, "_FEW", few)
        factors = rotation_factors(cosine, sine, layout, dtype)
        result = apply_rotation(leaf, factors, layout)
        with torch.no_grad():
            assert torch.equal(apply_rotation(x, factors, layout), result)
        gradient = torch.randn(expected.shape).to(dtype)
        result.backward(gradient)
    expected.backward(gradient)
    assert result.dtype == dtype
    assert torch.equal(x, before), "the heads that were handed in have changed"
    assert (result - expected).abs().max() <= tolerance(layout, dtype)
    assert leaf.grad is not None
    assert expected_from.grad is not None
    # A sum of two products, in either order: one rounding of the last place.
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(leaf.grad, expected_from.grad, atol=close, rtol=close)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("piece_bytes", [100, 2**20])
def test_gradients_of_any_order_are_those_of_differences(layout, rest, piece_bytes, monkeypatch):
    monkeypatch.setattr(rotation_kernel, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(rotation_kernel, "_FEW", 0)
    torch.manual_seed(0)
    cosine, sine = phases_of(4, 3, layout)
    x = torch.randn(1, 3, 2, 4 + rest, dtype=torch.float64).transpose(1, 2).requires_grad_()
    factors = rotation_factors(cosine, sine, layout, torch.float64)
    assert torch.autograd.gradcheck(lambda heads: apply_rotation(heads, factors, layout), x)
    assert torch.autograd.gradgradcheck(lambda heads: apply_rotation(heads, factors, layout).square(), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_learned_phases_get_their_gradient(layout):
    torch.manual_seed(0)
    angle = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)

    def rotated(heads, angles):
        both = angles.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat((angles, angles), -1)
        return apply_rotation(heads, rotation_factors(both.cos(), both.sin(), layout, heads.dtype), layout)

    assert torch.autograd.gradcheck(rotated, (x, angle))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 40])
def test_the_result_lies_in_memory_as_the_heads_do(layout, length, monkeypatch):
    """Kernels and caches read `(batch, length, heads, head_dim)`, and so does the projection in the backward pass."""
    monkeypatch.setattr(rotation_kernel, "_PIECE_BYTES", 512)
    monkeypatch.setattr(rotation_kernel, "_FEW", 0)
    x = torch.randn(2, length, 3, 8).transpose(1, 2).requires_grad_()
    factors = rotation_factors(*phases_of(8, length, layout), layout, torch.float32)
    result = apply_rotation(x, factors, layout)
    assert result.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(result, x, torch.ones(2, 3, length, 8))
    assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("few", [0, 2**15])
def test_nothing_of_the_heads_is_kept_for_the_backward_pass(layout, few, monkeypatch):
    monkeypatch.setattr(rotation_kernel, "_FEW", few)
    kept: list[torch.Tensor] = []
    x = torch.randn(1, 4, 64, 8, requires_grad=True)
    factors = rotation_factors(*phases_of(8, 64, layout), layout, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        apply_rotation(x, factors, layout)
    assert {tensor.data_ptr() for tensor in kept} <= {factor.data_ptr() for factor in factors if factor is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("few", [0, 10**6])
def test_factors_of_any_number_of_angles(layout, few, monkeypatch):
    monkeypatch.setattr(rotation_kernel, "_FEW", few)
    angles, x = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 8)
    repeated = angles.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat((angles, angles), -1)
    found = apply_rotation(x, factors_of_angles(angles, layout, x.dtype), layout)
    for head in range(3):
        expected = reference(x[:, [head]], repeated[:, head].cos(), repeated[:, head].sin(), layout)
        torch.testing.assert_close(found[:, [head]], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_derivatives_and_compilers_see_plain_torch(layout, monkeypatch):
    monkeypatch.setattr(rotation_kernel, "_FEW", 0)
    torch.manual_seed(0)
    cosine, sine = phases_of(4, 3, layout)
    x, direction = torch.randn(2, 2, 3, 6), torch.randn(2, 2, 3, 6)
    factors = rotation_factors(cosine, sine, layout, torch.float32)

    def rotate(heads):
        return apply_rotation(heads, factors, layout)

    # The rotation is linear, so that its derivative in a direction is the rotated direction.
    value, derivative = torch.func.jvp(rotate, (x,), (direction,))
    torch.testing.assert_close(value, reference(x, cosine, sine, layout))
    torch.testing.assert_close(derivative, reference(direction, cosine, sine, layout))
    torch.testing.assert_close(torch.func.vmap(rotate)(x.unsqueeze(0))[0], value)
    with torch.autograd.forward_ad.dual_level():
        dual = rotate(torch.autograd.forward_ad.make_dual(x, direction))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, derivative)
    compiled = torch.compile(
        lambda heads: apply_rotation(heads, rotation_factors(cosine, sine, layout, heads.dtype), layout),
        backend="eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(x), value)
