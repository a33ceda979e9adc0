"""A number per key, folded on the way forward, exact on the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_posenc.attention.folding import fold
from hf_posenc.attention.forms import FusedForm
from hf_posenc.schemes.bias.alibi import alibi_slopes

from .block_sizes import set_sizes
from .fused import separable_attention
from .plain_attention import gradients, plain_attention


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, backward_rows=6)


def exact(query: Tensor, key: Tensor, value: Tensor, terms: Tensor, scaling: float) -> Tensor:
    """Causal attention in float64."""
    bias = FusedForm.of_keys(terms, torch.arange(terms.shape[-1])).rows()
    return plain_attention(query, key, value, bias, None, scaling, True)


def tensors(batch: int, groups: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, length, 4, 8, generator=generator).transpose(1, 2)
    key, value = (torch.randn(batch, length, 4 // groups, 8, generator=generator).transpose(1, 2) for _ in range(2))
    logits = torch.randn(batch, 4, length, generator=generator)
    query, key, value = (tensor.to(dtype).requires_grad_() for tensor in (query, key, value))
    return query, key, value, logits.requires_grad_()


@pytest.mark.parametrize("largest", [(120.0, 16.0), (513.0, 16.0), (7600.0, 7600.0)])
def test_wide_heads_keep_their_digits_beside_large_terms(largest: tuple[float, float]) -> None:
    """A call too short for windows, with a scaling that is no power of two.

    The bounds are 2**-17 of the largest numbers: some steps of rounding of logits up to 10, and of sums over 128
    dimensions and a thousand keys.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 1024, 128, generator=generator).requires_grad_() for _ in range(3))
    steps = torch.rand(1, 2, 1024, generator=generator)
    terms = (steps.cumsum(-1) * (torch.tensor(largest).view(1, 2, 1) / 512)).requires_grad_()
    slots = torch.arange(1024)
    found = separable_attention(query, key, value, terms, slots, None, 128**-0.5, True)
    wanted = exact(query, key, value, terms, 128**-0.5)
    torch.testing.assert_close(found.double(), wanted, atol=2**-17, rtol=0)
    given = (query, key, value, terms)
    for one, other in zip(gradients(found, given), gradients(wanted, given), strict=True):
        torch.testing.assert_close(one, other, atol=2**-17 * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
def test_the_gradient_of_gates_over_a_long_row(dtype: torch.dtype, bound: float) -> None:
    """Each gate's gradient is a sum over all tokens behind it, in which rounded numbers would add up to noise.

    The bounds are several roundings of the dtype, for queries, keys, values and output; the kernel's own backward pass
    is off by more than all of the gradient in half precision.
    """
    query, key, value, logits = tensors(1, 2, 1024, dtype)
    found: list[Tensor] = []
    for in_float64 in (False, True):
        terms = -torch.nn.functional.logsigmoid(logits).cumsum(-1)
        slots = torch.arange(1024)
        if in_float64:
            output = exact(query, key, value, terms, 0.3)
        else:
            output = separable_attention(query, key, value, terms, slots, None, 0.3, True).double()
        found += gradients(output, [logits])
    assert float((found[0] - found[1]).norm() / found[1].norm()) <= bound


def test_autocast_of_float32_heads() -> None:
    """As norms of queries and keys leave them: the parts of a term have to be those of the dtype of the kernel."""
    query, key, value, _ = tensors(1, 2, 1100, torch.float32)
    terms = torch.arange(1100.0).mul(0.7).expand(1, 4, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = separable_attention(query, key, value, terms, torch.arange(1100), None, 0.3, True)
    halves = (tensor.detach().to(torch.bfloat16) for tensor in (query, key, value))
    wanted = exact(*halves, terms, 0.3)
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_wider_than_keys(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 1100, 16, generator=generator).to(dtype) for _ in range(2))
    value = torch.randn(1, 2, 1100, 64, generator=generator).to(dtype)
    terms = torch.rand(1, 2, 1100, generator=generator).cumsum(-1)
    found = separable_attention(query, key, value, terms, torch.arange(1100), None, 0.25, True)
    wanted = exact(query, key, value, terms, 0.25)
    assert found.shape[-1] == 64
    torch.testing.assert_close(found.double(), wanted, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)


@pytest.mark.on_cpu("kernels of GPUs sum products in another order")
def test_terms_of_ten_million_fit_into_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 1500, 16, generator=generator).half() for _ in range(3))
    terms = torch.zeros(1, 1, 1500)
    terms[..., 750:] = 1e7
    found = separable_attention(query, key, value, terms, torch.arange(1500), None, 0.25, True)
    wanted = exact(query, key, value, terms, 0.25)
    torch.testing.assert_close(found.double(), wanted, atol=4e-3, rtol=0)


@pytest.mark.parametrize("scaling", [0.25, 128**-0.5])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_terms_that_have_grown_large_keep_their_differences(dtype: torch.dtype, bound: float, scaling: float) -> None:
    """ALiBi at 32k tokens: terms of 16384, whose sum with a product would be off by 1e-3 in float32.

    In bfloat16 what is left comes from the content: the parts of the terms are exact.
    """
    generator, slots = torch.Generator().manual_seed(0), torch.arange(24)
    terms = (torch.tensor(alibi_slopes(4)).unsqueeze(-1) * (slots + 32768)).unsqueeze(0)
    query, key = (torch.randn(1, 4, 24, 16, generator=generator).to(dtype) for _ in range(2))
    wide_query, wide_key, factor = fold(query, key, terms, slots, scaling)
    # As a kernel has it: products in the dtype of the heads, summed in float32 in order.
    scores = torch.zeros(1, 4, 24, 24)
    for dimension in range(wide_query.shape[-1]):
        scores += wide_query[..., dimension].float().unsqueeze(-1) * wide_key[..., dimension].float().unsqueeze(-2)
    form = FusedForm.of_keys(terms.double(), slots)
    logits = query.double() @ key.double().transpose(-1, -2) * scaling + form.rows()
    torch.testing.assert_close(scores.double() * factor, logits.expand_as(scores), atol=bound, rtol=0)
