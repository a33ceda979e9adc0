"""Lengths and positions a caller may give: past a table, packed documents, caches, and axes that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hf_posenc
from hf_posenc import (
    UnsupportedError,
    patch_model,
)
from hf_posenc.patching.call.cache_checks import check_cache
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.forwards import forward_on_instance
from hf_posenc.schemes import BuildContext
from tests.matrix.running import distance, patched, tokens


def test_axes_that_differ_are_refused() -> None:
    model = patched("llama_gqa", "rope")
    axes = torch.arange(6).expand(3, 1, 6).clone()
    axes[1] += 1
    with pytest.raises(UnsupportedError, match="axes that differ"):
        model.model(input_ids=tokens(1, 6), position_ids=axes)


DOCUMENTS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
SEPARATED = hf_posenc.HierarchicalConfig(separators=(5, 7), segment="alibi")


def _with_separators() -> Tensor:
    """Two documents of 5 and 7 tokens; segments end within each, and the first document ends without a separator."""
    ids = tokens(1, 12).clamp(min=8)
    ids[0, [2, 7, 9]] = torch.tensor([5, 7, 5])
    return ids


@torch.no_grad()
def test_packed_documents_are_cut_into_segments_each_for_itself() -> None:
    model, ids = patched("llama_gqa", SEPARATED), _with_separators()
    packed = model(ids, position_ids=DOCUMENTS, use_cache=False).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], dim=1)
    assert distance(packed, alone) <= 1e-5
    whole = model(ids, use_cache=False).logits
    assert distance(packed, whole) > 1e-2
    grown = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    for length in (12, 13, 14):  # Segments are computed again for every token.
        assert grown[0, length] == model(grown[:, :length], use_cache=False).logits[0, -1].argmax()


@torch.no_grad()
def test_a_cache_without_the_separators_it_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where compiled decoding leaves the question to parts that must ask it: the length is a tensor there."""
    with pytest.warns(UserWarning, match="on tokens that a cache does not store"):
        model = patch_model(patched("llama_gqa", None), SEPARATED)
    ids = _with_separators()
    cached = model(ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match="among the 12 cached tokens"):
        model(ids[:, :1], past_key_values=cached)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    state = ForwardState(query_length=1, offset=torch.tensor(12))
    with pytest.raises(UnsupportedError, match="among the 12 cached tokens"):
        check_cache(SEPARATED.build(BuildContext(32, 4, 8)).additive, state)


@torch.no_grad()
def test_what_stands_at_padding_does_not_count_into_a_length() -> None:
    model, ids = patched("llama_gqa", "normalized_integer"), tokens(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[50, 50, 0, 1, 2, 3]])
    padded = model(ids, attention_mask=mask, position_ids=positions).logits[:, 2:]
    assert distance(padded, model(ids[:, 2:]).logits) <= 1e-5


def test_a_query_and_a_key_of_different_dtypes_are_turned_each_in_its_own() -> None:
    attention = forward_on_instance(patched("llama_gqa", "rope").model.layers[0].self_attn)
    query, key, state = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8).bfloat16(), ForwardState(6)
    turned_query, turned_key = attention.apply_map(state, query, key, 2)
    assert (turned_query.dtype, turned_key.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(turned_query, attention.apply_map(ForwardState(6), query, None, 2)[0])
    assert torch.equal(turned_key, attention.apply_map(ForwardState(6), key, key, 2)[1])
