"""A bias of distance without a matrix: values and all gradients against attention that has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posenc.attention import distance_attention as module
from hf_posenc.attention.distance_attention import distance_attention

from .plain_attention import masks, plain_attention, toeplitz

#: Sums of some dozen float32 products in another order, against float64.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MASKS = list(masks(1, 1, 1))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, of which the last is not full, at lengths of a test."""
    monkeypatch.setattr(module, "_SHORT_ROWS", 5)
    monkeypatch.setattr(module, "_LONG_ROWS", 7)
    monkeypatch.setattr(module, "_LONG", 20)
    monkeypatch.setattr(module, "_BACKWARD_ROWS", 6)


def tensors(
    batch: int, heads: int, groups: int, query_length: int, key_length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(query_length + 31 * key_length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = drawn(batch, query_length, heads, 8).transpose(1, 2)
    # As layers have them: with the axis of the heads behind that of the tokens.
    key, value = (drawn(batch, key_length, heads // groups, 8).transpose(1, 2) for _ in range(2))
    vector = drawn(heads, query_length + key_length - 1)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    return tuple(tensor.requires_grad_() for tensor in (query, key, value, vector))  # type: ignore[return-value]


def compare(given: tuple[Tensor, ...], mask: Tensor | None, causal: bool, tolerance: float) -> None:
    query, key, value, vector = given
    found = distance_attention(query, key, value, vector, mask, 0.3, causal)
    bias = toeplitz(vector, query.shape[2], key.shape[2])
    wanted = plain_attention(query, key, value, bias, mask, 0.3, causal)
    assert found.dtype == query.dtype
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((found.double() * weights).sum(), given)
    expected = torch.autograd.grad((wanted * weights).sum(), given)
    for one, other in zip(gradients, expected, strict=True):
        scale = float(other.abs().max().clamp(min=1))
        torch.testing.assert_close(one, other, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, dtype: torch.dtype) -> None:
    compare(tensors(3, 4, 2, 17, 17, dtype), masks(3, 17, 17)[kind], kind == "none", CLOSE[dtype])


@pytest.mark.parametrize("kind", MASKS)
def test_cached_keys(kind: str) -> None:
    """More keys than queries, as behind a cache."""
    compare(tensors(2, 4, 4, 9, 23, torch.float32), masks(2, 9, 23)[kind], False, CLOSE[torch.float32])


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    query_length=st.integers(2, 40),
    extra=st.integers(0, 9),
    kind=st.sampled_from(MASKS),
)
def test_any_shape(batch: int, groups: int, query_length: int, extra: int, kind: str) -> None:
    key_length = query_length + extra
    mask = masks(batch, query_length, key_length)[kind]
    causal = kind == "none" and extra == 0 and query_length % 3 > 0
    compare(tensors(batch, 4, groups, query_length, key_length, torch.float32), mask, causal, CLOSE[torch.float32])


def test_a_budget_for_scores_divides_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_SCORES", 4 * 17 * 20)
    blocks = list(module._blocks(5, 4, 40, 17, 64, True))
    assert all((stop - start) * 4 * 17 <= 4 * 17 * 20 for _, start, stop in blocks)
    assert {items.start for items, _, _ in blocks} == {0, 1, 2, 3, 4}
    compare(tensors(3, 4, 2, 17, 17, torch.float32), masks(3, 17, 17)["left padding"], False, CLOSE[torch.float32])


def test_the_kernel_is_given_a_view_of_the_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no key that none of its queries sees."""
    seen: list[tuple[int, torch.Size]] = []
    original = module.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        seen.append((attn_mask.untyped_storage().nbytes(), attn_mask.shape))
        return original(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(module, "scaled_dot_product_attention", watched)
    query, key, value, vector = (tensor.detach() for tensor in tensors(1, 4, 1, 17, 17, torch.float32))
    distance_attention(query, key, value, vector, None, 0.3, True)
    assert [shape[-1] for _, shape in seen] == [5, 10, 15, 17]
    assert all(size == vector.numel() * 4 for size, _ in seen)
    seen.clear()
    distance_attention(query, key, value, vector, masks(1, 17, 17)["window"], 0.3, False)
    assert [shape[-1] for _, shape in seen] == [5, 8, 8, 5]


def test_the_operator_is_one_that_torch_can_trace() -> None:
    given = tensors(2, 4, 2, 11, 11, torch.float32)
    torch.library.opcheck(module._distance_attention, (*given, None, 0.3, True))
    torch.library.opcheck(module._distance_attention, (*given, masks(2, 11, 11)["packed"], 0.3, False))


def test_autocast_computes_in_its_dtype() -> None:
    query, key, value, vector = tensors(1, 4, 2, 9, 9, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = distance_attention(query, key, value, vector, None, 0.3, True)
        found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in (query, key, vector))


def test_no_gradient_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, vector = tensors(1, 4, 2, 9, 9, torch.float32)
    monkeypatch.setattr(module, "_Diagonals", None)
    distance_attention(query, key, value, vector.detach(), None, 0.3, True).sum().backward()
    assert query.grad is not None
    assert vector.grad is None
