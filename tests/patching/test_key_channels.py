"""What a scheme keeps of a token travels with its key, exactly, through every cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import DynamicCache, StaticCache

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.attention.key_channels import append_features, split_features
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, outputs, patched, tokens

torch.set_num_threads(1)
LLAMA = ARCHITECTURES["llama_gqa"]


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    features=st.integers(1, 3),
    size=st.floats(1e-3, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_features_come_back(dtype, key_heads, groups, features, size):
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, key_heads, 5, 4, generator=generator).to(dtype)
    kept = size * torch.randn(2, key_heads * groups, 5, features, generator=generator)
    wide = append_features(key, kept)
    assert wide.dtype == dtype
    again, back = split_features(wide, key_heads * groups, features)
    assert torch.equal(again, key)
    # Three bfloat16 channels hold 24 bits; float16 ends at 2**-24 below 1, where its third channel is subnormal.
    torch.testing.assert_close(back, kept, rtol=2**-23, atol=2**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_gates_keep_their_digits_in_a_16_bit_cache(dtype):
    """The cached forward differs from the full one by rounding of keys and outputs only."""
    differences = []
    for scheme in ("forget_gate", "none"):
        model, ids = patched("llama_gqa", scheme).to(dtype), tokens(2, 40)
        full = outputs(model, LLAMA, ids, use_cache=False).float()
        cache = DynamicCache(config=model.config)
        steps = [outputs(model, LLAMA, ids[:, i : i + 1], past_key_values=cache, use_cache=True) for i in range(40)]
        differences.append(distance(torch.cat(steps, dim=1).float(), full))
    assert differences[0] <= 3 * differences[1] + 2 * torch.finfo(dtype).eps


@torch.no_grad()
def test_a_cropped_and_reordered_cache_keeps_each_gate_with_its_key():
    model, ids = patched("llama_gqa", "forget_gate"), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    outputs(model, LLAMA, ids, past_key_values=cache, use_cache=True)
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    continued = outputs(model, LLAMA, ids.flip(0)[:, 8:], past_key_values=cache, use_cache=True)
    assert distance(continued, outputs(model, LLAMA, ids.flip(0), use_cache=False)[:, 8:]) <= 1e-5


@torch.no_grad()
def test_left_padding_is_not_counted_behind_a_cache():
    """A scheme of absolute positions decodes a padded row like the row alone, with position ids and without."""
    for scheme in ("fire", "forget_gate", {"scheme": "self_extend", "window": 4, "group": 2}):
        model, ids = patched("llama_gqa", scheme), tokens(1, 12)
        full = outputs(model, LLAMA, ids, use_cache=False)
        padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), ids), dim=1)
        mask = (torch.arange(15) >= 3).long().unsqueeze(0)
        for given_positions in (False, True):
            for make in (DynamicCache, StaticCache):
                cache = make(config=model.config) if make is DynamicCache else make(model.config, max_cache_len=20)
                steps = []
                for start, stop in ((0, 9), (9, 10), (10, 15)):
                    arguments = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True}
                    if given_positions:
                        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
                    steps.append(outputs(model, LLAMA, padded[:, start:stop], **arguments))
                assert distance(torch.cat(steps, dim=1)[:, 3:], full) <= 1e-5


@torch.no_grad()
def test_positions_that_do_not_continue_the_cache_are_those_of_a_whole_forward():
    model, ids = patched("llama_gqa", "fire"), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 30]])
    ones = torch.ones_like(ids)
    expected = outputs(model, LLAMA, ids, position_ids=positions, attention_mask=ones, use_cache=False)[:, -1:]
    near = outputs(model, LLAMA, ids, attention_mask=ones, use_cache=False)[:, -1:]
    cache = DynamicCache(config=model.config)
    outputs(model, LLAMA, ids[:, :8], past_key_values=cache, use_cache=True)
    jump = {"position_ids": positions[:, 8:], "attention_mask": ones}
    found = outputs(model, LLAMA, ids[:, 8:], past_key_values=cache, use_cache=True, **jump)
    assert distance(found, expected) <= 1e-5
    assert distance(found, near) > 1e-3


@torch.no_grad()
def test_real_positions_count_for_schemes_that_read_pairs():
    """Gaps between position ids are distances: scaling them in the call is scaling them in the scheme."""
    gapped = patched("llama_gqa", {"scheme": "position_scale", "inner": "fire", "factor": 3})
    plain = patched("llama_gqa", "fire")
    inner, target = gapped.position_encoding.stacks, plain.position_encoding.stacks
    target.load_state_dict(dict(zip(target.state_dict(), inner.state_dict().values(), strict=True)))
    ids = tokens()
    position_ids = 3 * torch.arange(ids.shape[1]).unsqueeze(0)
    mask = torch.ones_like(ids)
    tripled = outputs(plain, LLAMA, ids, position_ids=position_ids, attention_mask=mask, use_cache=False)
    assert distance(tripled, outputs(gapped, LLAMA, ids, use_cache=False)) <= 1e-5
    assert distance(tripled, outputs(plain, LLAMA, ids, use_cache=False)) > 1e-3


@pytest.mark.parametrize("scheme", ["forget_gate", "pope", "xpos", "string"])
def test_layers_that_share_keys_refuse_what_has_to_meet_them(scheme):
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=None,
    )
    model = Gemma3nForCausalLM(config)
    with pytest.raises(UnsupportedError, match="reads the keys of an earlier layer"):
        patch_model(model, scheme)
    assert not hasattr(model, "position_encoding")


@pytest.mark.parametrize("scheme", ["pope", "forget_gate"])
def test_a_static_cache_that_is_made_before_its_first_key(scheme: str) -> None:
    """Chunked prefill makes it with the width of the config."""
    model, ids = patched("llama_gqa", scheme), tokens(1, 9)
    greedy = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **greedy)
    found = model.generate(ids, cache_implementation="static", prefill_chunk_size=4, **greedy)
    assert torch.equal(found, expected)
