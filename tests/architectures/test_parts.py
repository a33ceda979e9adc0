"""Faults that the sweep has found in parts of models, one of each class."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.patching.anatomy.anatomy import Anatomy

from .calling import Caller
from .overrides import PERCEPTION
from .population import Pair, pair_named
from .tiny import tiny_model


@torch.no_grad()
def test_layers_of_rows_and_columns_have_the_same_places_in_every_call() -> None:
    """SAM 3 passes the places of patches as columns first, and its rotation is replaced from the second call on."""
    caller = Caller(pair_named("vision-sam3_vit_model"))
    patch_model(caller.model, "rope_nd", grid=(4,))
    first = caller.outputs()
    assert torch.equal(caller.outputs(), first)
    torch.testing.assert_close(caller.eager(), first, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_bias_is_refused_by_eager_attention_that_ignores_its_mask() -> None:
    caller = Caller(pair_named("video-vjepa2"))
    patch_model(caller.model, "alibi", axes=3)
    caller.outputs()
    with pytest.raises(UnsupportedError, match=r"ignores its mask.*sdpa"):
        caller.eager()


@torch.no_grad()
def test_vectors_are_added_before_the_first_layer_of_nested_lists() -> None:
    caller = Caller(pair_named("vision-glpn"))
    stock = caller.outputs()
    patch_model(caller.model, "sinusoidal", axes=2)
    assert not torch.equal(caller.outputs(), stock)


def test_pooling_with_learned_queries_is_not_a_layer_of_self_attention() -> None:
    """The vision tower of PerceptionLM had it as its first layer, so no short run saw that `none` changed nothing."""
    model = tiny_model(pair_named("causal-bloom"))
    model.transformer.pool = type("AttentionPoolLatent", (nn.Linear,), {})(4, 4)
    (stack,) = Anatomy(model).stacks()
    assert [attention.path for attention in stack.attentions] == ["h.0.self_attention", "h.1.self_attention"]


def test_a_run_that_breaks_an_assertion_is_refused() -> None:
    model = tiny_model(pair_named("causal-bloom"))
    broken = type("Broken", (nn.LayerNorm,), {"forward": Mock(side_effect=AssertionError("too small"))})
    model.transformer.word_embeddings_layernorm = broken(64)
    with pytest.raises(UnsupportedError, match="AssertionError: too small"):
        patch_model(model, "none")


def test_timm_states_the_size_of_its_pictures_and_frames_are_a_series() -> None:
    pytest.importorskip("timm")
    vit = (("architecture", "vit_tiny_patch16_224"), ("model_args", PERCEPTION))
    (stack,) = Anatomy(tiny_model(Pair("vision", "timm_wrapper", "vit", vit))).stacks()
    assert stack.layout.native == (4, 4)
    (stack,) = Anatomy(tiny_model(pair_named("video-pe_video_encoder"))).stacks(["video"])
    assert type(stack.layout).__name__ == "Series"
