"""Masks of every form: what they say about positions, and what they do not say."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_posenc import UnsupportedError, native_scheme, patch_model
from hf_posenc.attention.block_attention import merge_mask
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, freshly_compiled, outputs, patched, tokens
from tests.thinning import mostly_slow

pytestmark = pytest.mark.usefixtures("without_gradients")
SELF_EXTEND = {"scheme": "self_extend", "window": 4, "group": 2}


def blocks(lengths: tuple[int, ...], causal: bool) -> Tensor:
    """`(1, 1, length, length)` bool: every document sees itself."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = documents.unsqueeze(0) == documents.unsqueeze(1)
    return (visible.tril() if causal else visible)[None, None]


def additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2", "bert"])
def test_a_mask_with_a_block_per_document_says_nothing_about_padding(architecture: str) -> None:
    """Stock numbers slots under such a mask, and so does the native round trip."""
    causal, model, ids = ARCHITECTURES[architecture].causal, patched(architecture, None), tokens(1, 12)
    arguments: dict[str, Any] = {"attention_mask": additive(blocks((6, 6), causal))}
    if causal:
        arguments["use_cache"] = False
    stock = outputs(model, ids, **arguments)
    patch_model(model, native_scheme(model))
    assert distance(outputs(model, ids, **arguments), stock) <= 1e-5


@pytest.mark.parametrize("architecture", ["llama_gqa", "bert"])
def test_packed_rows_of_a_length_dependent_scheme_are_refused_under_such_a_mask_too(architecture: str) -> None:
    with pytest.warns(UserWarning, match=r"use_cache|LayerNorm"):
        model = patch_model(patched(architecture, None), "normalized_integer")
    position_ids = torch.cat((torch.arange(5), torch.arange(7))).unsqueeze(0)
    mask = additive(blocks((5, 7), ARCHITECTURES[architecture].causal))
    with pytest.raises(UnsupportedError, match="separate rows"):
        model(tokens(1, 12), attention_mask=mask, position_ids=position_ids)


@pytest.mark.parametrize(
    ("scheme", "compiled"),
    mostly_slow(
        product(["fire", SELF_EXTEND, ["rope", "forget_gate"]], [False, True]),
        lambda case: not case[1] or case[0] == SELF_EXTEND,
    ),
)
def test_a_window_and_padding_in_a_static_cache(scheme: Any, compiled: bool) -> None:
    """generate() prepares the mask, which shows the window and hides the padding; positions still count back."""
    model = patched("mistral_sliding", scheme, sliding_window=12, **({"num_hidden_layers": 1} if compiled else {}))
    ids = tokens(1, 10)
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.int64), ids), dim=1)
    mask = (torch.arange(15) >= 5).long().unsqueeze(0)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    if compiled:
        model.forward = freshly_compiled(model.forward)
    both = model.generate(padded, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(both.sequences[:, 15:], alone.sequences[:, 10:])
    assert distance(torch.stack(both.logits), torch.stack(alone.logits)) <= 1e-4


def test_a_masked_key_stays_masked_whatever_the_bias() -> None:
    """In float16 a gate that forgets everything adds more than the mask subtracts."""
    mask = additive(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()).clamp(min=torch.finfo(torch.float16).min).half()
    merged = merge_mask(mask, torch.full((1, 2, 3, 3), 1e5), torch.float16)
    assert (merged[..., 0, 1:] == torch.finfo(torch.float16).min).all()
    assert (merged[..., 2, :] > 0).all()


def test_several_axes_need_no_mask_of_the_caller() -> None:
    model, ids = patched("llama_gqa", {"scheme": "mrope", "layout": "half"}), tokens(2, 8)
    axes = torch.stack((torch.arange(8), torch.arange(8) // 4, torch.arange(8) % 4)).unsqueeze(1).expand(3, 2, 8)
    without = outputs(model, ids, position_ids=axes, use_cache=False)
    assert distance(without, outputs(model, ids, position_ids=axes, attention_mask=torch.ones_like(ids))) <= 1e-6
    assert distance(without, outputs(model, ids, use_cache=False)) > 1e-3


def test_latent_attention_does_not_know_the_axes_of_cached_keys() -> None:
    model = patched("deepseek_v3_mla", {"scheme": "rope_nd", "assignment": "mixed", "grid": [4]})
    axes = torch.stack((torch.arange(8) // 4, torch.arange(8) % 4)).unsqueeze(1)
    ids, cache = tokens(1, 8), DynamicCache(config=model.config)
    outputs(model, ids[:, :6], position_ids=axes[..., :6], past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"several axes|cached keys stand"):
        outputs(model, ids[:, 6:], position_ids=axes[..., 6:], past_key_values=cache)


@pytest.mark.parametrize("kind", ["a key less liked", "a key hidden from one head", "numbers of documents"])
def test_a_mask_that_hides_no_token_moves_no_position(kind: str) -> None:
    stock, ids = patched("llama_gqa", None), tokens(1, 10)
    mask = additive(blocks((10,), causal=True)).repeat(1, 1 if kind == "a key less liked" else 4, 1, 1)
    if kind == "numbers of documents":
        mask = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3, 3, 3]])
    elif kind == "a key less liked":
        mask[..., 4:, 4] += -1.0
    else:
        mask[:, 0, :, 3] = torch.finfo(torch.float32).min
    expected = stock(ids, attention_mask=mask, use_cache=False).logits
    found = patched("llama_gqa", "native")(ids, attention_mask=mask, use_cache=False).logits
    assert float((found - expected).abs().max()) <= 1e-5
