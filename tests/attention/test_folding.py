"""A number per key as dimensions of queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_posenc.attention.folding import fold
from hf_posenc.attention.forms import DistanceForm, SeparableForm
from hf_posenc.schemes.bias.alibi import alibi_slopes

from .plain_attention import gradients, plain_attention

LENGTH, HEADS, WIDTH = 24, 4, 8


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_of_folded(query: Tensor, key: Tensor, value: Tensor, form: SeparableForm, scaling: float) -> Tensor:
    wide_query, wide_key, scaling = fold(query, key, form.terms, form.query_slots, scaling)
    none = torch.zeros(1, HEADS, query.shape[2], key.shape[2])
    return plain_attention(wide_query, wide_key, value, none, None, scaling, True)


@pytest.mark.parametrize("scaling", [8**-0.5, 1.0, 0.125])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_and_gradients(groups: int, scaling: float) -> None:
    """Against the matrix: float64 sums of float32 parts, whose remainders are below 1e-6."""
    query = drawn(2, HEADS, LENGTH, WIDTH).requires_grad_()
    key, value = (drawn(2, HEADS // groups, LENGTH, WIDTH, seed=seed).requires_grad_() for seed in (1, 2))
    terms = (drawn(2, HEADS, LENGTH, seed=3).abs() * 3).cumsum(-1).requires_grad_()
    form = SeparableForm(terms, torch.arange(LENGTH))
    found = attention_of_folded(query, key, value, form, scaling)
    wanted = plain_attention(query, key, value, form.rows(), None, scaling, True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    given = (query, key, value, terms)
    for one, other in zip(gradients(found, given), gradients(wanted, given), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scaling", [0.25, 128**-0.5])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_terms_that_have_grown_large_keep_their_differences(dtype: torch.dtype, bound: float, scaling: float) -> None:
    """ALiBi at 32k tokens: terms of 16384, whose sum with a product would be off by 1e-3 in float32.

    In bfloat16 what is left comes from the content: the parts of the terms are exact.
    """
    start = 32768
    slopes = torch.tensor(alibi_slopes(HEADS))
    terms = (slopes.unsqueeze(-1) * (torch.arange(LENGTH) + start)).unsqueeze(0)
    query, key = (drawn(1, HEADS, LENGTH, 16, seed=seed, dtype=dtype) for seed in (0, 1))
    wide_query, wide_key, factor = fold(query, key, terms, torch.arange(LENGTH), scaling)
    # As a kernel has it: products in the dtype of the heads, summed in float32 in order.
    scores = torch.zeros(1, HEADS, LENGTH, LENGTH)
    for dimension in range(wide_query.shape[-1]):
        scores += wide_query[..., dimension].float().unsqueeze(-1) * wide_key[..., dimension].float().unsqueeze(-2)
    form = SeparableForm(terms.double(), torch.arange(LENGTH))
    exact = query.double() @ key.double().transpose(-1, -2) * scaling + form.rows()
    torch.testing.assert_close(scores.double() * factor, exact.expand_as(scores), atol=bound, rtol=0)


def test_a_linear_bias_of_distance_is_separable() -> None:
    slopes = torch.tensor(alibi_slopes(HEADS))
    distances = torch.arange(2 * LENGTH - 1) - (LENGTH - 1)
    form = DistanceForm(-distances.abs() * slopes.unsqueeze(-1), LENGTH, LENGTH, slopes)
    separable = form.separable()
    assert separable is not None
    below = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(separable.rows()[..., below], form.rows()[..., below])
    assert DistanceForm(form.vector, LENGTH, LENGTH).separable() is None
