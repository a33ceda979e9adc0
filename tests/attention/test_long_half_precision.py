"""Half precision at long distance: biases of thousands beside queries of 8 or 11 digits.

A few queries at the end of a row of many keys, against attention in float64 that is given the same rounded queries,
keys and values. What the format itself forces is measured beside it, by the same call with a bias of zero: the
rounding of probabilities and of the output.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posenc.attention.forms import BiasForm, FusedForm, RowsForm
from hf_posenc.schemes import get_scheme
from hf_posenc.schemes.positions import AttentionPairs, Positions
from tests.schemes.table import parts_for
from tests.thinning import in_turn, mostly_slow

from .fused import attended
from .plain_attention import plain_attention

#: Heads as `parts_for` builds them.
HEADS, WIDTH, QUERIES = 6, 16, 20
SCHEMES = ["alibi", "kerple", "fire", "forget_gate"]


def biased(scheme: str, queries: int, length: int, query: Tensor, key: Tensor) -> tuple[BiasForm, Tensor]:
    """The form a patched layer would hand over for the last queries of a row, and the same in float64."""
    slots = torch.arange(length - queries, length)
    bias: Any = parts_for(get_scheme(scheme)()).logit_bias
    if scheme in ("alibi", "kerple"):
        distances = torch.arange(1 - length, queries)
        form = FusedForm(bias(distances).detach(), queries, length, bias.slopes_behind(torch.device("cpu")))
        return form, form.rows().double()
    if scheme == "forget_gate":
        # Gates of a trained model: most remember, some forget.
        generator = torch.Generator().manual_seed(1)
        gates = nn.functional.logsigmoid(torch.randn(1, HEADS, length, generator=generator) * 2 + 1)
        exact = gates.double().cumsum(-1).neg()
        terms = gates.cumsum(-1).neg()
        return FusedForm.of_keys(terms, slots), exact.unsqueeze(-2) - exact[..., slots].unsqueeze(-1)
    ids = torch.arange(length).unsqueeze(0)
    pairs = AttentionPairs(query, key, slots, Positions(ids, ids.new_full((1, 1), length)), WIDTH**-0.5)
    with torch.no_grad():
        dense = bias(pairs)
    return RowsForm(lambda start, stop, count: dense[..., start:stop, :count], queries, length, HEADS), dense.double()


def errors(scheme: str, dtype: torch.dtype, length: int, queries: int) -> tuple[float, float]:
    """Largest errors with the bias and with a bias of zero, in units of the largest output."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(1, HEADS, queries, WIDTH, generator=generator).to(dtype)
    key, value = (torch.randn(1, HEADS, length, WIDTH, generator=generator).to(dtype) for _ in range(2))
    mask = (torch.arange(length) <= torch.arange(length - queries, length).unsqueeze(-1))[None, None]
    form, exact = biased(scheme, queries, length, query, key)
    nothing = FusedForm(torch.zeros(HEADS, queries + length - 1), queries, length)
    found = []
    for one, dense in ((form, exact), (nothing, torch.zeros_like(exact))):
        with torch.no_grad():
            output = attended(one, query, key, value, mask, is_causal=False)
            wanted = plain_attention(query, key, value, dense, mask, WIDTH**-0.5, False)
        found.append(float((output.double() - wanted).abs().max() / wanted.abs().max()))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("scheme", "dtype", "queries", "length"),
    [
        *in_turn(SCHEMES, [torch.bfloat16, torch.float16], [1, QUERIES], [6000]),
        *mostly_slow(
            product(SCHEMES, [torch.bfloat16, torch.float16], [1, QUERIES], [16_000, 32_000]), lambda _: False
        ),
    ],
    ids=str,
)
def test_the_error_is_that_of_the_format(scheme: str, dtype: torch.dtype, queries: int, length: int) -> None:
    """With the bias: half an ulp of the output and half an ulp of probabilities.

    The same call without a bias shows that much too: 0.3 to 0.45 `eps`, beside at most 0.7 with one.
    """
    with_bias, without = errors(scheme, dtype, length, queries)
    eps = torch.finfo(dtype).eps
    assert without <= eps
    assert with_bias <= eps
