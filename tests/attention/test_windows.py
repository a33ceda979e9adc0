"""Keys that cannot change a result are skipped, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc.attention import windows
from hf_posenc.attention.forms import FusedForm
from hf_posenc.attention.fused_attention import fused_attention
from hf_posenc.attention.windows import Windows, windows_of

from .block_sizes import set_sizes
from .fused import distance_attention, separable_attention
from .plain_attention import assert_gradients_agree, plain_attention, toeplitz

pytestmark = pytest.mark.on_cpu("windows are used on a CPU")

HEADS, LENGTH, WIDTH = 4, 192, 16
SCALING = WIDTH**-0.5
#: Heads that see a few keys, many, and all of them.
SLOPES = torch.tensor([4.0, 1.0, 0.25, 0.0])


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "SHORTEST", 8)
    monkeypatch.setattr(windows, "_TILE", 8)
    monkeypatch.setattr("hf_posenc.attention.fused_attention._WINDOW_ROWS", 32)
    set_sizes(monkeypatch, backward_rows=24)


def inputs(queries: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, queries), (2, LENGTH), (2, LENGTH))
    return [torch.randn(2, *shape, WIDTH, generator=generator).to(dtype) for shape in shapes]


def distances(queries: int = LENGTH) -> Tensor:
    return torch.arange(queries + LENGTH - 1) - (LENGTH - 1)


def alibi(queries: int = LENGTH) -> Tensor:
    return -SLOPES.unsqueeze(-1) * distances(queries).abs()


def bump(queries: int = LENGTH) -> Tensor:
    """Decays, and rises again far away."""
    return alibi(queries) + 300.0 * (distances(queries).abs() == 100)


BIASES = {"alibi": alibi, "bump": bump}


def every_head(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // tensor.shape[1], 1)


def reference(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor) -> Tensor:
    """In float64, `(batch, query_len, heads, width)`."""
    return plain_attention(query, key, value, bias, visible, SCALING, False)


def leaves(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of which gradients are asked for, and their copies in float64."""
    given = [tensor.requires_grad_() for tensor in tensors]
    return given, [tensor.detach().double().requires_grad_() for tensor in given]


def visible(causal: bool, queries: int = LENGTH) -> Tensor:
    everything = torch.ones(queries, LENGTH, dtype=torch.bool)
    return everything.tril(LENGTH - queries) if causal else everything


def rounding(dtype: torch.dtype) -> float:
    """A few rounding steps of the output, whose components are below 4."""
    return 16 * torch.finfo(dtype).eps


def skipped(found: Windows | None, queries: int = LENGTH) -> int:
    assert found is not None
    return sum(
        (heads.stop - heads.start) * (LENGTH - (end - first))
        for item in range(found.first.shape[0])
        for start in range(0, queries, 32)
        for heads, first, end in found.of_rows(item, start, min(start + 32, queries))
    )


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_bias_of_distance(name: str, causal: bool, dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype=dtype)
    vector = BIASES[name]()
    vector = vector.double() if dtype == torch.float64 else vector
    arguments = (query, key, value, vector, None, SCALING, causal)
    assert skipped(windows_of((query, key, value), vector, None, None, SCALING, causal)) > LENGTH
    found = distance_attention(*arguments)
    expected = reference(query, key, value, toeplitz(vector, LENGTH, LENGTH), visible(causal))
    assert float((found - expected).abs().max()) <= rounding(dtype)


@pytest.mark.parametrize("queries", [LENGTH, 50])
@pytest.mark.parametrize("kind", ["causal", "padding", "sliding", "documents", "per head"])
def test_masks(kind: str, queries: int) -> None:
    query, key, value = inputs(queries=queries)
    mask = visible(True, queries).expand(2, 1, -1, -1).clone()
    if kind == "padding":
        mask[1, ..., :40] = False
        mask[1, :, : max(0, 40 - (LENGTH - queries)), 0] = True  # a row of padding that sees one key
    elif kind == "sliding":
        mask &= visible(True, queries).triu(LENGTH - queries - 20)
    elif kind == "documents":
        mask[..., 150:, :150] = False
    elif kind == "per head":
        mask = mask.repeat(1, HEADS, 1, 1)
        mask[:, 1, :, 30:60] = False  # heads that do not see themselves in some rows
        mask[..., 0] = True
    arguments = (query, key, value, alibi(queries), mask, SCALING, False)
    assert skipped(windows_of((query, key, value), alibi(queries), None, mask, SCALING, False), queries) > 0
    found = distance_attention(*arguments)
    expected = reference(query, key, value, toeplitz(alibi(queries), queries, LENGTH), mask)
    assert float((found - expected).abs().max()) <= rounding(torch.float32)


@pytest.mark.parametrize("padded", [True, False])
def test_a_number_per_key(padded: bool) -> None:
    query, key, value = inputs()
    generator = torch.Generator().manual_seed(3)
    terms = (torch.rand(2, HEADS, LENGTH, generator=generator) * SLOPES.view(1, -1, 1)).cumsum(-1)
    mask = None
    seen = visible(True)
    if padded:
        mask = seen.expand(2, 1, -1, -1).clone()
        mask[1, ..., :40] = False
        mask[1, :, :40, 0] = True
        seen = mask
    given, wanted = leaves(query, key, value, terms)
    assert skipped(windows_of(given[:3], None, terms, mask, SCALING, not padded)) > LENGTH
    found = separable_attention(*given, torch.arange(LENGTH), mask, SCALING, not padded)  # type: ignore[call-arg]
    bias = wanted[3].unsqueeze(-2) - wanted[3].unsqueeze(-1)
    expected = reference(*wanted[:3], bias, seen)
    # The folded terms are of the size 400: their products are rounded to 400 eps before the softmax.
    assert float((found - expected).abs().max()) <= 400 * torch.finfo(torch.float32).eps
    assert_gradients_agree(found, given, expected, wanted, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["alibi", "bump"])
def test_the_sum_of_a_bias_of_distance_and_a_number_per_key(name: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    terms = (torch.rand(2, HEADS, LENGTH, generator=generator) * 12 * SLOPES.view(1, -1, 1)).cumsum(-1)
    vector = BIASES[name]()
    heads = inputs()
    windows = windows_of(heads, vector, terms, None, SCALING, causal)
    assert skipped(windows) > LENGTH
    # The terms have to compensate for what the vector may add to a far key.
    alone = windows_of(heads, None, terms, None, SCALING, causal)
    assert (skipped(alone) > skipped(windows)) == (name == "bump")
    given, wanted = leaves(*heads, vector, terms)
    form = FusedForm(given[3], LENGTH, LENGTH, terms=given[4], query_slots=torch.arange(LENGTH))
    found = fused_attention(*given[:3], form, None, SCALING, causal)  # type: ignore[call-arg]
    bias = toeplitz(wanted[3], LENGTH, LENGTH) + wanted[4].unsqueeze(-2) - wanted[4].unsqueeze(-1)
    expected = reference(*wanted[:3], bias, visible(causal))
    # Sums of terms of 9,000 are rounded to 9,000 eps before the softmax.
    assert float((found - expected).abs().max()) <= 9000 * torch.finfo(torch.float32).eps
    assert_gradients_agree(found, given, expected, wanted, 1e-4)


#: Changes of queries, keys and values in place.
ATTACKS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a huge key": lambda query, key, value: key[:, :, 3].copy_(40.0 * query[:, :2, -1]),
    "a huge value": lambda query, key, value: value[:, :, 3].fill_(1e12),
    "a huge query": lambda query, key, value: query[:, :, -1].mul_(1e3),
    "not a number": lambda query, key, value: key[:, :, 3, 0].fill_(torch.nan),
    "an infinite value": lambda query, key, value: value[:, :, 3, 0].fill_(torch.inf),
    "every query dislikes its own key most": lambda query, key, value: query.copy_(-10.0 * every_head(key)),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_far_and_counts_is_seen(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs()
    ATTACKS[attack](query, key, value)
    given = (query, key, value, alibi(), None, SCALING, True)
    found = distance_attention(*given)
    monkeypatch.setattr(windows, "SHORTEST", 2 * LENGTH)
    dense = distance_attention(*given)
    assert torch.equal(found.isfinite(), dense.isfinite())
    expected = reference(query, key, value, toeplitz(alibi(), LENGTH, LENGTH), visible(True))
    # Relative to the largest component of a row, in which both calls sum up the same numbers in another order.
    size = dense.abs().amax(-1, keepdim=True)
    rounded = float(((dense - expected).abs() / size).nan_to_num(0.0, 0.0, 0.0).max())
    error = float(((found - expected).abs() / size).nan_to_num(0.0, 0.0, 0.0).max())
    assert error <= 2 * max(rounded, torch.finfo(torch.float32).eps)


def test_the_one_large_gradient_reaches_far_keys() -> None:
    given, wanted = leaves(*inputs())
    weight = torch.ones(2, LENGTH, 1, 1)
    weight[:, -1] = 1e12
    found = distance_attention(*given, alibi(), None, SCALING, True)  # type: ignore[call-arg]
    expected = reference(*wanted, toeplitz(alibi(), LENGTH, LENGTH), visible(True))
    ours = torch.autograd.grad((found * weight).sum(), given[1:])
    for one, other in zip(ours, torch.autograd.grad((expected * weight).sum(), wanted[1:]), strict=True):
        assert float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max()) <= 1e-4


def test_the_gradient_of_a_query_reads_long_keys_that_are_far() -> None:
    """Queries of almost 0 do not show in their logits how long those keys are."""
    query, key, value = inputs()
    query, long = query * 1e-9, torch.ones(LENGTH, 1)
    long[: LENGTH // 2] = 1e6
    given, wanted = leaves(query, key * long, value)
    found = distance_attention(*given, alibi(), None, SCALING, True)  # type: ignore[call-arg]
    expected = reference(*wanted, toeplitz(alibi(), LENGTH, LENGTH), visible(True))
    (ours,), (other,) = torch.autograd.grad(found.sum(), given[0]), torch.autograd.grad(expected.sum(), wanted[0])
    error = (ours - other).norm(dim=-1) / other.norm(dim=-1)
    # The first query sees one key, and has no gradient.
    assert float(error[..., 1:].max()) <= 1e-3


def test_a_bias_that_does_not_decay_and_an_additive_mask_have_no_windows() -> None:
    """The mask may raise what is far away."""
    flat = torch.randn(HEADS, 2 * LENGTH - 1, generator=torch.Generator().manual_seed(5))
    assert windows_of(inputs(), flat, None, None, SCALING, True) is None
    assert windows_of(inputs(), None, flat[None, :, :LENGTH], None, SCALING, True) is None
    assert windows_of(inputs(), alibi(), None, torch.zeros(1, 1, LENGTH, LENGTH), SCALING, False) is None


def test_a_padding_query_behind_a_cutoff_has_no_gradient() -> None:
    """All keys that it sees are -inf away."""
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    cutoff = torch.zeros(HEADS, 2 * LENGTH - 1).masked_fill(distances().abs() > 5, -torch.inf)
    mask = visible(True).expand(2, 1, -1, -1).clone()
    mask[1, ..., 40:] = False
    found = distance_attention(query, key, value, cutoff, mask, SCALING, False)
    weight = torch.ones(2, LENGTH, 1, 1)
    weight[1, 40:] = 0.0
    for gradient in torch.autograd.grad((found * weight).sum(), (query, key, value)):
        assert bool(gradient.isfinite().all())


def test_the_gradient_of_a_learned_bias_has_the_digits_of_float32_in_a_half_precision_model() -> None:
    """Keys that a result in bfloat16 does not need are a part of the gradient of slopes, which is float32."""
    generator = torch.Generator().manual_seed(0)
    key, value, weight = (torch.randn(1, HEADS, LENGTH, WIDTH, generator=generator) for _ in range(3))
    query = torch.zeros_like(key)
    drifting = value + torch.arange(LENGTH).view(1, 1, -1, 1) / 16
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        slopes = torch.tensor(
            [0.5, 0.25, 0.125, 0.0625], dtype=torch.promote_types(dtype, torch.float32)
        ).requires_grad_()
        heads = [tensor.bfloat16().to(dtype) for tensor in (query, key, drifting)]
        vector = -slopes.unsqueeze(-1) * distances().abs()
        found = distance_attention(*heads, vector, None, SCALING, True)
        gradients.append(torch.autograd.grad((found * weight.bfloat16().to(dtype).transpose(1, 2)).sum(), slopes)[0])
    # The gradient that arrives is that of a float64 result; only probabilities and sums are float32.
    assert float(((gradients[0] - gradients[1]) / gradients[1]).abs().max()) <= 1e-5
