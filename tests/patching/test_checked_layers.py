"""Layers that reuse the checks of the first layer of their kind compute the same as without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_posenc.patching.call.checked_layer import CheckedLayer
from hf_posenc.schemes import ScheduleConfig, ShawConfig, TisaConfig
from tests.matrix.running import drawn, patched, tokens

LAYERS = 4
#: A scheme for each way in which a bias is computed.
SCHEMES = [
    "alibi",
    "tisa",
    "shaw",
    "fire",
    "tupe",
    "disentangled",
    "forget_gate",
    "grape_ap",
    "swin",
    "low_rank_relative",
]
Change = Callable[[Any], None]


def other_scaling(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 3.0


def narrower_mask(model: Any) -> None:
    def narrow(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        queries, cache = kwargs["hidden_states"].shape[1], kwargs.get("past_key_values")
        keys = queries + (0 if cache is None else cache.get_seq_length(2))
        near = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries - 2)
        return args, kwargs | {"attention_mask": near[None, None]}

    model.model.layers[2].self_attn.register_forward_pre_hook(narrow, with_kwargs=True)


def other_options(model: Any) -> None:
    """The first two layers and the last two call the attention function with different tensors as an option."""
    for index, layer in enumerate(model.model.layers):
        option = {"hint": torch.full((2,), float(index // 2))}
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, option=option: (args, kwargs | option), with_kwargs=True
        )


def frozen_layers(model: Any) -> None:
    """The first layers run without gradients."""
    for layer in model.model.layers[:2]:
        forward = layer.self_attn.forward
        layer.self_attn.forward = torch.no_grad()(forward)


CHANGES: list[Change] = [lambda model: None, other_scaling, narrower_mask, other_options, frozen_layers]


def built(scheme: Any, change: Change) -> Any:
    model = drawn(patched("llama_gqa", scheme, num_hidden_layers=LAYERS, attn_implementation="sdpa"), std=0.3)
    change(model)
    return model


def results(model: Any) -> list[Tensor]:
    """Logits of a short text, of each token after it, and the gradients of a training step."""
    ids, cache = tokens(length=9), DynamicCache(config=model.config)
    with torch.no_grad():
        found = [model(input_ids=ids[:, :6], past_key_values=cache).logits]
        found += [model(input_ids=ids[:, [step]], past_key_values=cache).logits for step in range(6, 9)]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    weights = (*model.parameters(), *model.position_encoding.parameters())
    return found + [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("<>"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_are_those_of_layers_that_check_everything(
    scheme: str, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(built(scheme, change))
    monkeypatch.setattr(CheckedLayer, "attend", lambda *_: None)
    expected = results(built(scheme, change))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_most_layers_check_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []
    original = CheckedLayer.attend

    def attend(checked: CheckedLayer, site: Any, call: Any, arguments: Any, query: Tensor, *heads: Tensor) -> Any:
        output = original(checked, site, call, arguments, query, *heads)
        attended.extend([query.shape[2]] * (output is not None))
        return output

    monkeypatch.setattr(CheckedLayer, "attend", attend)
    results(built(scheme, lambda model: None))
    assert attended == [6] * (LAYERS - 1) + [1] * 3 * (LAYERS - 1) + [9] * (LAYERS - 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_layer_has_checked_dies_with_its_call(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of references would keep the memory of a call until the garbage collector runs."""
    model, states = built(scheme, lambda model: None), []
    original = CheckedLayer.of.__func__

    def of(cls: type, site: Any, call: Any, *given: Any) -> Any:
        states.append(weakref.ref(call.state))
        return original(cls, site, call, *given)

    monkeypatch.setattr(CheckedLayer, "of", classmethod(of))
    gc.disable()
    try:
        results(model)
        model.zero_grad()
        assert states
        assert all(state() is None for state in states)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "configs",
    [(ShawConfig(max_distance=2), ShawConfig(max_distance=4)), (TisaConfig(), TisaConfig(num_kernels=2))],
    ids=["shaw", "tisa"],
)
def test_layers_with_other_options_are_of_another_kind(configs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = ScheduleConfig(configs * (LAYERS // 2))
    found = results(built(scheme, lambda model: None))
    monkeypatch.setattr(CheckedLayer, "attend", lambda *_: None)
    for one, other in zip(found, results(built(scheme, lambda model: None)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
