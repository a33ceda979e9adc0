"""What `patch_model` promises whatever the scheme: bad input, failures, repetition, schedules, third parties."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_posenc import (
    InterleavedConfig,
    LinearScaling,
    LocalGlobalConfig,
    RopeConfig,
    ScheduleConfig,
    UnsupportedError,
    patch_model,
    unpatch_model,
)
from tests.architectures.calling import Caller
from tests.architectures.population import pair_named
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import outputs, patched, tokens
from tests.models import tiny
from tests.patching.test_changed_models import put_a_stock_layer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(("architecture", "scheme"), [("llama_gqa", "alibi"), ("bert", "t5")])
@torch.no_grad()
def test_copies_are_independent(architecture: str, scheme: str, copied: Callable[[Any], Any]) -> None:
    """They have weights, a record, a watch over their layers, and a `generate` of their own."""
    model = patched(architecture, scheme)
    expected, clones = outputs(model, tokens()), [copied(model) for _ in range(3)]
    if ARCHITECTURES[architecture].causal:
        clones[0].config.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
        put_a_stock_layer(clones[1])
        for clone, message in ((clones[0], "rope_parameters"), (clones[1], "patch_model again")):
            with pytest.raises(UnsupportedError, match=message):
                outputs(clone, tokens())
        assert clones[2].__dict__["generate"].model is clones[2]
        assert inspect.signature(model.generate) == inspect.signature(patched(architecture, None).generate)
    assert torch.equal(outputs(model, tokens()), expected)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(outputs(clones[2], tokens()), expected)
    unpatch_model(clones[2])
    assert "position_encoding" not in dict(clones[2].named_modules())
    assert "generate" not in clones[2].__dict__
    stock = patched(architecture, None)
    assert type(clones[2].config) is type(stock.config)
    assert torch.equal(outputs(clones[2], tokens()), outputs(stock, tokens()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["masked-roformer", "causal-bloom", "vision-dinov3_vit"])
@torch.no_grad()
def test_copies_of_unusual_models(name: str, copied: Callable[[Any], Any]) -> None:
    """One that rotates in a method, one that is declared by functions, and one with a module before its base model."""
    caller = Caller(pair_named(name))
    stock = caller.outputs()
    caller.model = copied(patch_model(caller.model, "alibi"))
    assert not torch.equal(caller.outputs(), stock) or name == "causal-bloom"
    unpatch_model(caller.model)
    assert torch.equal(caller.outputs(), stock)


def test_a_path_around_the_attention_interface_is_refused() -> None:
    model = patched("gpt2", "alibi", reorder_and_upcast_attn=True)
    with pytest.raises(UnsupportedError, match="reorder_and_upcast_attn"):
        model(tokens())


def test_the_encoding_alone_cannot_be_copied() -> None:
    model = patched("bert", "t5")
    with pytest.raises(UnsupportedError, match="modules_to_save"):
        copy.deepcopy(model.position_encoding)


def test_unpatch_after_weights_were_assigned_thaws_what_is_there_now() -> None:
    model = patched("bert", None)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    patch_model(model, "alibi")
    model.load_state_dict(weights, strict=False, assign=True)
    unpatch_model(model)
    assert model.bert.embeddings.position_embeddings.weight.requires_grad


@pytest.mark.parametrize(
    "scheme",
    [
        "rope", RopeConfig, RopeConfig(), {"scheme": "rope"}, ["rope", "alibi"], InterleavedConfig(every=2),
        ScheduleConfig(("rope", "none")), copy.deepcopy(RopeConfig(layout="half")),
    ],
    ids=str,
)  # fmt: skip
def test_a_base_that_nobody_gave_warns_where_the_model_has_another(scheme: Any) -> None:
    model = patched("llama_gqa", None)
    model.config.rope_parameters["rope_theta"] = 5e5
    with warnings.catch_warnings(record=True, action="always") as caught:
        patch_model(model, scheme)
    (message,) = [str(found.message) for found in caught]
    assert "theta=10000, its default, but this model was built with 500000" in message
    alone = patched("llama_gqa", scheme).position_encoding.config.name == "rope"
    keep = "pass theta=500000 to keep" if alone else "use 'native' in its place or give it theta=500000 to keep"
    assert keep in message


@pytest.mark.parametrize("parameters", [{"rope_type": "linear"}, {"full_attention": {"rope_type": "linear"}}], ids=str)
def test_a_scaling_that_a_rotation_drops_is_named(parameters: Any) -> None:
    model = patched("llama_gqa", None)
    model.config.rope_parameters = parameters
    with pytest.warns(UserWarning, match="'rope' has no scaling of its frequencies, .* with rope_type 'linear'"):
        patch_model(model, "rope")
    with warnings.catch_warnings(action="error"):
        patch_model(model, "rope", scaling=None)
        patch_model(model, "alibi")


def test_layers_of_different_types_are_compared_with_their_own_base_and_scaling() -> None:
    model = tiny("Gemma3ForCausalLM", head_dim=8, layer_types=["sliding_attention", "full_attention"])
    with pytest.warns(UserWarning, match=r"built with 1e\+06 in some layers.*LocalGlobalConfig"):
        patch_model(model, "rope")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(unpatch_model(model), "rope", layers=[0])
        patch_model(unpatch_model(model), LocalGlobalConfig(RopeConfig(), RopeConfig(theta=1e6)))
        unpatch_model(model).config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 2.0}
        patch_model(model, LocalGlobalConfig(RopeConfig(), RopeConfig(theta=1e6, scaling=LinearScaling(2.0))))


def test_a_base_that_was_given_is_meant() -> None:
    model = patched("llama_gqa", None)
    model.config.rope_parameters["rope_theta"] = 5e5
    with warnings.catch_warnings(action="error"):
        patch_model(model, "p_rope", theta=1e4)  # meant
        for given in (RopeConfig(1e4), RopeConfig(theta=1e4), {"scheme": "rope", "theta": 1e4}, RopeConfig().to_dict()):
            patch_model(model, given)
            patch_model(model, [given, "t5"])
        patch_model(model, copy.deepcopy(RopeConfig(theta=1e4)))
        patch_model(model, "alibi")
        model.config.rope_parameters = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 5e5}}
        patch_model(model, "rope")  # the base of one type of its layers


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["sinusoidal", "alibi"])
def test_two_threads_can_run_one_model(scheme: str) -> None:
    """Every call has separate positions, which a layer without its call's state would not know."""
    model = patched("llama_gqa", scheme)
    inputs = [tokens(1, 4 + size, seed=size) for size in range(8)]
    places = [(torch.arange(4 + size) * (1 + size)).unsqueeze(0) for size in range(8)]
    calls = [{"input_ids": ids, "position_ids": where} for ids, where in zip(inputs, places, strict=True)]
    expected = [outputs(model, **call, use_cache=False) for call in calls]

    def run(index: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(outputs(model, **calls[index], use_cache=False), expected[index]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))
