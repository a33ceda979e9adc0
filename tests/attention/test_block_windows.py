"""Flex attention's block masks leave out blocks that cannot change a result, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from hf_posenc.attention import windows
from hf_posenc.attention.block_windows import narrowed
from hf_posenc.attention.forms import FusedForm
from tests.matrix.running import distance, outputs, patched
from tests.thinning import in_turn

HEADS, LENGTH, WIDTH = 3, 640, 16
SLOPES = torch.tensor([4.0, 0.5, 0.0])


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "SHORTEST", 256)


def causal(item: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def second_is_padded(item: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((item == 0) | (key >= 200))


def everything(item: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= 0


def alibi() -> FusedForm:
    distances = torch.arange(2 * LENGTH - 1) - (LENGTH - 1)
    return FusedForm(-SLOPES.unsqueeze(-1) * distances.abs(), LENGTH, LENGTH)


def gates() -> FusedForm:
    terms = (torch.rand(2, HEADS, LENGTH, generator=torch.Generator().manual_seed(3)) * SLOPES.view(1, -1, 1)).cumsum(
        -1
    )
    return FusedForm.of_keys(terms, torch.arange(LENGTH))


def heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator) for _ in range(3)]


def weights(form: Any, query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """`(batch, heads, query_len, key_len)`, in float64; a row that sees nothing is zero."""
    scores = WIDTH**-0.5 * query.double() @ key.double().transpose(-1, -2) + form.rows().double()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize(
    ("rule", "make", "attacked"), in_turn([causal, second_is_padded, everything], [alibi, gates], [False, True])
)
def test_blocks_that_are_left_out_weigh_nothing(rule: Any, make: Any, attacked: bool) -> None:
    query, key, value = heads()
    if attacked:
        key[:, :, 3] = 200.0 * query[:, :, -1]
    mask = create_block_mask(rule, 2, None, LENGTH, LENGTH, device=torch.get_default_device())
    found = narrowed(mask, make(), query, key, value, WIDTH**-0.5)
    before, after = (one.to_dense().expand(2, HEADS, -1, -1).bool() for one in (mask, found))
    assert not (after & ~before).any()
    assert (before & ~after)[:, 0].any()
    # Without a slope there is nothing to leave out.
    assert torch.equal(before[:, 2], after[:, 2])
    items = torch.arange(2).view(2, 1, 1, 1)
    rows, keys = torch.arange(LENGTH).view(-1, 1), torch.arange(LENGTH)
    visible = rule(items, items, rows, keys).expand(2, 1, LENGTH, LENGTH)
    weight = weights(make(), query, key, visible)
    hidden = (before & ~after).repeat_interleave(128, -1).repeat_interleave(128, -2)
    share = (weight * hidden).sum(-1)
    assert float(share.max()) <= torch.finfo(torch.float32).eps / 4
    if attacked:
        # The last query needs the far key more than its own.
        assert after[0, 1, -1, 0]


@pytest.mark.long
@pytest.mark.parametrize("scheme", [pytest.param("alibi", marks=pytest.mark.slow), "forget_gate"])
@torch.no_grad()
def test_a_model_with_flex_attention_equals_eager(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": LENGTH}
    tokens = torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    model = patched("llama_gqa", scheme, **overrides)
    for parameter in model.parameters():
        # Gates that close, and small logits.
        parameter.mul_(0.1)
    expected = outputs(model, tokens)
    left_out = []

    def counted(mask: Any, *args: Any) -> Any:
        found = narrowed(mask, *args)
        left_out.append(found.sparsity() - mask.sparsity())
        return found

    monkeypatch.setattr("hf_posenc.attention.backends.narrowed", counted)
    model.set_attn_implementation("flex_attention")
    assert distance(outputs(model, tokens), expected) <= 1e-4
    assert min(left_out) > 0
