"""A bias of distance without a matrix: values and all gradients against attention that has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_posenc.attention import blockwise, fused_attention as module
from hf_posenc.attention.forms import FusedForm
from hf_posenc.errors import UnsupportedError

from .block_sizes import set_sizes
from .fused import attended, distance_attention
from .plain_attention import gradients, masks, plain_attention, toeplitz

#: Sums of some dozen float32 products in another order, against float64.
CLOSE = 1e-5
HEADS = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, of which the last is not full, at lengths of a test."""
    set_sizes(monkeypatch, distance_rows=5, long_distance_rows=7, backward_rows=6)
    monkeypatch.setattr(module, "_LONG", 20)


def tensors(
    batch: int, groups: int, query_length: int, key_length: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(query_length + 31 * key_length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = drawn(batch, query_length, HEADS, 8).transpose(1, 2)
    # As layers have them: with the axis of the heads behind that of the tokens.
    key, value = (drawn(batch, key_length, HEADS // groups, 8).transpose(1, 2) for _ in range(2))
    vector = drawn(HEADS, query_length + key_length - 1)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    return tuple(tensor.requires_grad_() for tensor in (query, key, value, vector))  # type: ignore[return-value]


def compare(given: tuple[Tensor, ...], mask: Tensor | None, causal: bool = False) -> None:
    query, key, value, vector = given
    found = distance_attention(query, key, value, vector, mask, 0.3, causal)
    bias = toeplitz(vector, query.shape[2], key.shape[2])
    wanted = plain_attention(query, key, value, bias, mask, 0.3, causal)
    assert found.dtype == query.dtype
    torch.testing.assert_close(found.double(), wanted, atol=CLOSE, rtol=CLOSE)
    for one, other in zip(gradients(found, given), gradients(wanted, given), strict=True):
        scale = float(other.abs().max().clamp(min=1))
        torch.testing.assert_close(one, other, atol=CLOSE * scale, rtol=CLOSE)


@pytest.mark.parametrize("kind", masks(1, 1, 1))
@settings(max_examples=5, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    query_length=st.integers(2, 40),
    extra=st.integers(0, 9),
)
def test_any_shape(batch: int, groups: int, query_length: int, extra: int, kind: str) -> None:
    key_length = query_length + extra
    mask = masks(batch, query_length, key_length)[kind]
    causal = kind == "none" and extra == 0 and query_length % 3 > 0
    compare(tensors(batch, groups, query_length, key_length), mask, causal)


@pytest.mark.parametrize("kind", [kind for kind in masks(1, 1, 1) if kind.startswith("queries without keys")])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["", "dropout"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"kept_probabilities": 0}, {"kept_numbers": 0, "bias_numbers": 300}, {"short_pairs": 0}],
    ids=["kept", "matrix", "blocks", "fused"],
)
def test_queries_without_keys(
    sizes: dict[str, int], dropout: float, learned: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scores have no gradient. A sum with the smallest number rounds a score away, but not its gradient."""
    set_sizes(monkeypatch, **sizes)
    query, key, value, vector = tensors(2, 2, 9, 9)
    mask = masks(2, 9, 9)[kind]
    given = (query, key, value, *([vector] if learned else []))
    form = FusedForm(vector if learned else vector.detach(), 9, 9)
    found = attended(form, query, key, value, mask, scaling=0.3, dropout=dropout)
    wanted = plain_attention(query, key, value, toeplitz(vector, 9, 9), mask, 0.3, False)
    torch.testing.assert_close(found.double(), wanted, atol=CLOSE, rtol=CLOSE)
    torch.testing.assert_close(gradients(found, given), gradients(wanted, given), atol=CLOSE, rtol=CLOSE)


def test_a_budget_for_scores_divides_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, scores=HEADS * 17 * 5)
    compare(tensors(3, 2, 17, 17), masks(3, 17, 17)["left padding"])


@pytest.mark.on_cpu("blocks have other sizes elsewhere")
def test_the_kernel_is_given_a_view_of_the_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no key that none of its queries sees."""
    seen: list[tuple[int, torch.Size]] = []
    original = blockwise.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        seen.append((attn_mask.untyped_storage().nbytes(), attn_mask.shape))
        return original(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(blockwise, "scaled_dot_product_attention", watched)
    query, key, value, vector = (tensor.detach() for tensor in tensors(1, 1, 17, 17))
    distance_attention(query, key, value, vector, None, 0.3, True)
    assert [shape[-1] for _, shape in seen] == [5, 10, 15, 17]
    assert all(size == vector.numel() * 4 for size, _ in seen)
    seen.clear()
    distance_attention(query, key, value, vector, masks(1, 17, 17)["window"], 0.3, False)
    assert [shape[-1] for _, shape in seen] == [5, 8, 8, 5]


def test_the_operator_is_one_that_torch_can_trace() -> None:
    given = tensors(2, 2, 11, 11)
    torch.library.opcheck(module._fused_attention, (*given, None, None, None, 0.3, True))
    torch.library.opcheck(module._fused_attention, (*given, None, None, masks(2, 11, 11)["packed"], 0.3, False))
    terms = torch.rand(2, 4, 11).requires_grad_()
    torch.library.opcheck(module._fused_attention, (*given[:3], None, terms, torch.arange(11), None, 0.3, True))


def test_a_mask_may_have_one_entry_for_all_keys_or_is_refused() -> None:
    """Cropping a block must not treat this entry as the first key alone."""
    given = tensors(2, 2, 17, 17)
    compare(given, torch.ones(1, 1, 1, 1, dtype=torch.bool))
    compare(given, torch.ones(2, 1, 17, 1, dtype=torch.bool))
    for shape in ((1, 1, 17, 9), (1, 1, 5, 17), (17, 17)):
        with pytest.raises(UnsupportedError, match="17 queries and 17 keys"):
            distance_attention(*given, torch.ones(shape, dtype=torch.bool), 0.3, False)


def test_a_query_that_an_additive_mask_leaves_nothing_has_no_gradient() -> None:
    query, key, value, vector = tensors(2, 2, 17, 17)
    mask = torch.zeros(1, 1, 17, 17).masked_fill(~torch.ones(17, 17, dtype=torch.bool).tril(), -torch.inf)
    mask[:, :, 3] = -torch.inf
    output = distance_attention(query, key, value, vector, mask, 0.3, False)
    torch.testing.assert_close(output[:, 3], value.mean(-2).repeat_interleave(2, 1))
    found = torch.autograd.grad(output.square().sum(), (query, key, value, vector))
    assert all(gradient.isfinite().all() for gradient in found)
    assert not found[0][:, :, 3].any()


def test_double_precision_stays_double() -> None:
    query, key, value, vector = tensors(1, 2, 9, 9, dtype=torch.float64)
    found = distance_attention(query, key, value, vector, None, 0.3, True)
    wanted = plain_attention(query, key, value, toeplitz(vector, 9, 9), None, 0.3, True)
    (one,), (other,) = (torch.autograd.grad(output.square().sum(), query) for output in (found, wanted))
    torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_a_second_derivative_is_refused_and_nothing_is_attended_for_no_row() -> None:
    query, key, value, vector = tensors(1, 2, 9, 9)
    output = distance_attention(query, key, value, vector, None, 0.3, True)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        gradient.sum().backward()
    found = distance_attention(query[:0], key[:0], value[:0], vector, None, 0.3, True)
    assert found.shape == (0, 9, 4, 8)
    (gradient,) = torch.autograd.grad(found.sum(), vector)
    assert not gradient.any()


@pytest.mark.on_cpu("autocast of the CPU")
def test_autocast_does_not_round_a_large_bias() -> None:
    """bfloat16 tells 1000 and 1003 apart from nothing between; the result has to be that of bfloat16 heads alone."""
    query, key, value, vector = tensors(1, 2, 17, 17)
    vector = (vector.detach() + 1000 + torch.arange(33) % 3).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = distance_attention(query, key, value, vector, None, 0.3, True)
        gradients_of = torch.autograd.grad(found.float().sum(), (query, key, vector))
    assert {gradient.dtype for gradient in gradients_of} == {torch.float32}
    halves = (tensor.detach().to(torch.bfloat16) for tensor in (query, key, value))
    torch.testing.assert_close(found, distance_attention(*halves, vector, None, 0.3, True), atol=0, rtol=0)
