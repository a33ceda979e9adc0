"""Layers and tables that were put into a patched model afterwards carry no scheme, and are not passed over."""

from __future__ import annotations

import copy
import pickle
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_posenc import UnsupportedError, patch_model, save_position_adapter, unpatch_model
from hf_posenc.patching.place.encoding import encodings
from tests.matrix.running import patched, tokens

SCHEMES = ("alibi", "t5", "none", "pope", "sinusoidal")


def with_a_stock_layer(model: Any) -> Any:
    """The model with its last layer rebuilt from its class and its weights."""
    old = model.model.layers[1]
    new = type(old)(model.config, 1).eval()
    new.load_state_dict(old.state_dict())
    model.model.layers[1] = new
    return model


def with_stock_attention(model: Any) -> Any:
    layer = model.model.layers[1]
    new = type(layer.self_attn)(model.config, 1).eval()
    new.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = new
    return model


def with_one_layer_more(model: Any) -> Any:
    model.model.layers.append(type(model.model.layers[0])(model.config, 0).eval())
    return model


def with_forwards_removed(model: Any) -> Any:
    for layer in model.model.layers:
        del layer.self_attn.forward
    return model


CHANGES = [with_a_stock_layer, with_stock_attention, with_one_layer_more, with_forwards_removed]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", [False, True], ids=["first call", "later call"])
@torch.no_grad()
def test_a_call_of_a_half_patched_model_names_the_layer(change: Any, before: bool) -> None:
    model = patched("llama_gqa", "alibi")
    if before:
        model(tokens(1, 8))
    change(model)
    with pytest.raises(UnsupportedError, match=r"layers\.\d\.self_attn \(LlamaAttention\).*[Cc]all patch_model again"):
        model(tokens(1, 8))


@torch.no_grad()
def test_a_stock_table_in_a_patched_model_is_named() -> None:
    model = patched("gpt2", "alibi")
    model(tokens(1, 8))
    model.transformer.wpe = nn.Embedding(64, 32)
    with pytest.raises(UnsupportedError, match=r"wpe \(Embedding\)"):
        model(tokens(1, 8))


@pytest.mark.parametrize("scheme", ["alibi", "sinusoidal"])
def test_a_half_patched_model_is_not_saved(scheme: str, tmp_path: Path) -> None:
    model = with_a_stock_layer(patched("llama_gqa", scheme))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn"):
        save_position_adapter(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_patching_again_gives_the_model_that_was_meant(scheme: str) -> None:
    stock, model, ids = patched("llama_gqa", None), patched("llama_gqa", scheme), tokens(1, 8)
    expected, weights = model(ids).logits, model.model.position_encoding.state_dict()
    with_a_stock_layer(model)
    patch_model(model, scheme)
    model.model.position_encoding.load_state_dict(weights)
    assert torch.equal(model(ids).logits, expected)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, stock(ids).logits)


@torch.no_grad()
def test_layers_that_carry_the_scheme_may_be_copied_deleted_and_swapped() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    first, second = model.model.layers
    model(ids)
    for layers in ((second, first), (first,), (first, second, first)):
        model.model.layers = nn.ModuleList(layers)
        model(ids, use_cache=False)
    model.model.layers = nn.ModuleList((first, copy.deepcopy(second)))
    model(ids)


@torch.no_grad()
def test_copies_and_pickles_watch_their_own_layers() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    model(ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(ids)
        with_a_stock_layer(other)
        with pytest.raises(UnsupportedError, match="patch_model again"):
            other(ids)
        model(ids)


@torch.no_grad()
def test_a_forward_that_another_library_has_wrapped_still_carries_the_scheme() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    expected = model(ids).logits
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("compiled_before", [False, True])
@torch.no_grad()
def test_a_compiled_call_names_the_layer_too(compiled_before: bool) -> None:
    torch._dynamo.reset()
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if compiled_before:
        expected = model(ids, use_cache=False).logits
        assert torch.allclose(compiled(ids, use_cache=False).logits, expected, atol=1e-5)
    with_a_stock_layer(model)
    with pytest.raises(Exception, match=r"layers\.1\.self_attn"):
        compiled(ids, use_cache=False)


def test_a_call_pays_microseconds_for_it() -> None:
    """About 10 us for 40 layers on an idle machine, whose Python costs 100 times as much. The best of five counts."""
    model = patched("llama_gqa", "alibi", num_hidden_layers=40)
    (encoding,) = encodings(model)
    watch = encoding.stacks["model"].runtime.watch
    assert min(timeit.repeat(watch.check, timer=time.process_time, number=100, repeat=5)) / 100 < 400e-6
