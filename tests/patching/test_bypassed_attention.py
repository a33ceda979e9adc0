"""Attention that is computed beside the patched modules, or by a function that has positions, is refused."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from hf_posenc import UnsupportedError, patch_model
from tests.matrix.running import patched, tokens
from tests.patching.test_record import own_attention


class _Beside(nn.Module):
    """A module around an attention that computes attention itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return own_attention(self.inner, hidden_states)


class _Called(LlamaAttention):
    __call__ = own_attention


def _put_beside(layer: Any) -> None:
    layer.self_attn = _Beside(layer.self_attn)


def _call_instead(layer: Any) -> None:
    layer.self_attn.__class__ = _Called


def _layer_alone(layer: Any) -> None:
    layer.forward = lambda hidden_states, **_: own_attention(layer.self_attn, hidden_states)[0]


@pytest.mark.parametrize("layers", [slice(None), slice(1, None), slice(1)], ids=["all", "last", "first"])
@pytest.mark.parametrize("bypass", [_put_beside, _call_instead, _layer_alone])
@pytest.mark.parametrize("scheme", ["alibi", "rope", "none"])
@torch.no_grad()
def test_attention_that_is_computed_beside_the_patched_module_is_refused(
    scheme: str, bypass: Any, layers: slice
) -> None:
    before, model, ids = patched("llama_gqa", None), patched("llama_gqa", scheme), tokens(1, 8)
    model(ids)
    for layer in (*before.model.layers[layers], *model.model.layers[layers]):
        bypass(layer)
    for action in (lambda: patch_model(before, scheme), lambda: model(ids), lambda: model(ids)):
        with pytest.raises(UnsupportedError, match=r"did not run in this call|in contrast to that of other layers"):
            action()


@pytest.mark.parametrize("called", [True, False])
@torch.no_grad()
def test_a_graph_that_bypasses_an_attention_is_refused(called: bool) -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    if called:
        compiled(ids)
    _put_beside(model.model.layers[1])
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.inner .* did not run in this call"):
            compiled(ids)


def test_a_layer_may_be_dropped_at_random_in_training_but_not_always() -> None:
    model, ids = patched("llama_gqa", "alibi").train(), tokens(1, 4)
    layer = model.model.layers[1]
    inner = layer.forward
    runs = itertools.cycle([False] * 60 + [True])
    layer.forward = functools.wraps(inner)(lambda hidden, **kwargs: inner(hidden, **kwargs) if next(runs) else hidden)
    for _ in range(130):
        model(ids)
    _put_beside(layer)
    layer.forward = inner
    for _ in range(100):
        model(ids)
    with pytest.raises(UnsupportedError, match="did not run in this call"):
        model(ids)


def _eager(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(module, query, key, value, mask, **kwargs)


def _fading(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return _eager(module, query, key, value * torch.linspace(0, 1, value.shape[2])[:, None], mask, **kwargs)


@torch.no_grad()
def test_an_attention_function_chosen_after_the_patch_has_no_positions(tmp_path: Path) -> None:
    model, ids = patched("llama_gqa", "rope"), tokens(1, 8)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    for name, function in (("of_a_user", _eager), ("fading", _fading)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation("of_a_user")
    assert torch.equal(model(ids).logits, expected)
    AttentionInterface.register("of_a_user", _fading)
    with pytest.raises(UnsupportedError, match="'of_a_user' was registered by other code"):
        model(ids)
    model.set_attn_implementation("fading")
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fading")):
        with pytest.raises(UnsupportedError, match="'fading' was registered by other code"):
            one(ids)
