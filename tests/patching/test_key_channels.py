"""The features of a token are stored exactly with its key, in every cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import DynamicCache

from hf_posenc import AttentionPairs, BuildContext, PairwiseBias, Positions
from hf_posenc.attention.key_channels import append_features, num_channels, split_features
from hf_posenc.patching.anatomy.anatomy import TEXT
from hf_posenc.patching.place.generation import page_width
from hf_posenc.recipes.initialization.logits import layers_of
from hf_posenc.schemes.outer_parts import SummedPairwiseBias
from hf_posenc.schemes.registry import as_scheme
from tests.matrix.running import outputs, patched, tokens
from tests.thinning import in_turn


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeated=st.booleans(),
    features=st.integers(1, 3),
    size=st.floats(1e-3, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_features_come_back(dtype, key_heads, groups, repeated, features, size):
    """Of more heads than there are keys, and of fewer, where an architecture caches repeated keys."""
    generator = torch.Generator().manual_seed(0)
    few, many = key_heads, key_heads * groups
    key = torch.randn(2, many if repeated else few, 5, 4, generator=generator).to(dtype)
    kept = size * torch.randn(2, few if repeated else many, 5, features, generator=generator)
    wide = append_features(key, kept)
    assert wide.dtype == dtype
    again, back = split_features(wide, kept.shape[1], features)
    assert torch.equal(again, key)
    # Three bfloat16 channels hold 24 bits; float16 ends at 2**-24 below 1, where its third channel is subnormal.
    torch.testing.assert_close(back, kept, rtol=2**-23, atol=2**-24)


#: Scheme -> numbers that a token has per key head, in a layer of 6 query heads and 2 key heads of width 8.
NUMBERS: dict[str, tuple[Any, int]] = {
    "grape_m": ("grape_m", 1),
    "grape_m per head": ({"scheme": "grape_m", "per_head": True}, 1),
    "selective_rope": ("selective_rope", 4),
    "selective_rope with gates": ({"scheme": "selective_rope", "gate": True}, 5),
    "forget_gate": ("forget_gate", 3),
    "grape_ap": ({"scheme": "grape_ap", "width": 2}, 6),
    "both kinds": (["forget_gate", "selective_rope", {"scheme": "grape_ap", "width": 2}], 3 + 4 + 6),
}


@pytest.mark.parametrize(("label", "dtype"), in_turn(NUMBERS, [torch.float32, torch.bfloat16]))
@torch.no_grad()
def test_what_query_heads_share_is_cached_once(label: str, dtype: torch.dtype) -> None:
    scheme, numbers = NUMBERS[label]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 48}
    model, ids = patched("llama_gqa", scheme, **heads).to(dtype), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    outputs(model, ids, past_key_values=cache, use_cache=True)
    width = 8 + num_channels(numbers, dtype)
    assert [layer.keys.shape[-1] for layer in cache.layers] == [width] * len(cache.layers)
    assert {page_width(layer, dtype) for layer in layers_of(model.position_encoding, TEXT)} == {width}


def pairs_for(bias: PairwiseBias, hidden_states: torch.Tensor) -> AttentionPairs:
    length = hidden_states.shape[1]
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, length, 8, generator=generator) for heads in (6, 2))
    slots = torch.arange(length)
    positions = Positions(slots.unsqueeze(0), torch.tensor([[length]]))
    return AttentionPairs(query, key, slots, positions, 0.3, hidden_states, bias.key_features(hidden_states))


#: One in three orders of two biases with features of query heads and two with features of key heads.
ORDERS = [*itertools.permutations(("forget_gate", "grape_ap", "selective_rope", "grape_m"))][::3]


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_sums_and_blends_give_each_bias_its_own_features(order: tuple[str, ...]) -> None:
    hidden = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    context = BuildContext(num_heads=6, num_key_value_heads=2, head_dim=8, hidden_size=48, causal=True)
    parts: list[Any] = [as_scheme(name).build(context).logit_bias for name in order]
    alone = [part(pairs_for(part, hidden)) for part in parts]
    nested = SummedPairwiseBias([parts[0], SummedPairwiseBias(parts[1:])])
    features = (nested.num_features, nested.num_shared_features)
    assert features == (sum(part.num_features for part in parts), 4 + 1)
    for total in (SummedPairwiseBias(parts), nested):
        torch.testing.assert_close(total(pairs_for(total, hidden)), sum(alone), rtol=1e-5, atol=1e-5)
    blend = SummedPairwiseBias({"old": parts[0], "new": SummedPairwiseBias(parts[1:])}, strength=0.25)
    expected = 0.75 * alone[0] + 0.25 * sum(alone[1:])
    torch.testing.assert_close(blend(pairs_for(blend, hidden)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["pope", "forget_gate", "grape_m"])
def test_a_static_cache_that_is_made_before_its_first_key(scheme: str) -> None:
    """Chunked prefill makes it with the width of the config."""
    model, ids = patched("llama_gqa", scheme), tokens(1, 9)
    greedy = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **greedy)
    found = model.generate(ids, cache_implementation="static", prefill_chunk_size=4, **greedy)
    assert torch.equal(found, expected)
