"""What `patch_model` promises whatever the scheme: bad input, failures, repetition, schedules, third parties."""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_posenc import (
    InterleavedConfig,
    NoneConfig,
    RopeConfig,
    ScheduleConfig,
    SinusoidalConfig,
    UnsupportedError,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import outputs, patched, tokens

LLAMA = ARCHITECTURES["llama_gqa"]


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return outputs(model, LLAMA, tokens())


def _assert_stock(model: Any, stock: Tensor) -> None:
    assert torch.equal(_logits(model), stock)
    assert not hasattr(model, "position_encoding")
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("alibbi", {}, "Did you mean 'alibi'"),
        ("rope", {"thetta": 1.0}, "Did you mean 'theta'"),
        ("rope", {"theta": -1.0}, "theta"),
        ("rope", {"rotary_dim": 6000}, "6000"),
        ("rope", {"scaling": {"type": "yarnn", "factor": 2.0}}, "Did you mean 'yarn'"),
        ("rope", {"scaling": {"type": "linear"}}, "needs the option factor"),
        (3, {}, "Not a scheme"),
        (RopeConfig(), {"theta": 2.0}, "already a config"),
        ("alibi", {"layers": [5]}, "layers with self-attention are"),
        ("alibi", {"layers": []}, "contains no layer"),
        ("alibi", {"layers": [-1]}, "layers with self-attention are"),
        *(("alibi", {"layers": mask}, "For a mask, pass") for mask in ([True, False], torch.tensor([False, True]))),
        *(
            ("alibi", {"layers": one}, "must be a collection")
            for one in (1, True, "01", torch.tensor(1), np.int64(0), {0: False}, b"\0")
        ),
        *(("alibi", {"layers": [one]}, "not the index of a layer") for one in (0.0, "0", None)),
        ("alibi", {"elsewhere": "none"}, "Pass `layers` as well"),
        (ScheduleConfig(layers=(SinusoidalConfig(), NoneConfig())), {}, "acts once, before the first layer"),
        *((ScheduleConfig(layers=[NoneConfig()] * count), {}, f"has {count} layers") for count in (1, 3)),
    ],
)
def test_bad_input_teaches_and_leaves_the_model_alone(scheme: Any, options: dict[str, Any], message: str) -> None:
    model = patched("llama_gqa", None)
    stock = _logits(model)
    with pytest.raises((ValueError, TypeError), match=message):
        patch_model(model, scheme, **options)
    _assert_stock(model, stock)


def test_other_models_are_untouched() -> None:
    first, second = patched("llama_gqa", None), patched("llama_gqa", None)
    stock = _logits(second)
    patch_model(first, "alibi")
    assert torch.equal(_logits(second), stock)
    assert not torch.equal(_logits(first), stock)


def test_copies_are_independent() -> None:
    model = patched("bert", "t5")
    row = ARCHITECTURES["bert"]
    clones = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        expected = outputs(model, row, tokens())
        for parameter in model.parameters():
            parameter.zero_()
        for clone in clones:
            assert torch.equal(outputs(clone, row, tokens()), expected)
            unpatch_model(clone)
            assert "position_encoding" not in dict(clone.named_modules())


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel"):
        patch_model(nn.Linear(2, 2), "alibi")


def test_constant_positions_under_layer_norm_warn_with_the_remedy() -> None:
    with pytest.warns(UserWarning, match="direction="):
        patch_model(ARCHITECTURES["bert"].build(), "integer")


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


def test_a_warning_turned_into_an_error_leaves_the_model_alone() -> None:
    model = patched("bert", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="direction="):
            patch_model(model, "integer")
    assert not hasattr(model, "position_encoding")


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(model, scheme)
    (message,) = [str(found.message) for found in caught]
    assert "theta=10000, its default, but this model was built with 500000" in message
    assert "pass theta=500000" in message


def test_a_base_that_was_given_is_meant() -> None:
    model = patched("llama_gqa", None)
    model.config.rope_parameters["rope_theta"] = 5e5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
    """Every call has positions of its own, which a layer without its call's state would not know."""
    model = patched("llama_gqa", scheme)
    inputs = [tokens(1, 4 + size, seed=size) for size in range(8)]
    places = [(torch.arange(4 + size) * (1 + size)).unsqueeze(0) for size in range(8)]
    calls = [{"input_ids": ids, "position_ids": where} for ids, where in zip(inputs, places, strict=True)]
    expected = [outputs(model, LLAMA, **call, use_cache=False) for call in calls]

    def run(index: int) -> bool:
        with torch.no_grad():
            return all(
                torch.equal(outputs(model, LLAMA, **calls[index], use_cache=False), expected[index]) for _ in range(10)
            )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


def test_layers_that_share_keys_need_one_rotation_and_nothing_that_meets_them_later() -> None:
    model = tiny_model(pair_named("causal-gemma3n_text"))
    with pytest.raises(UnsupportedError, match="reads the keys of layer"):
        patch_model(model, "rope", layers=[len(model.model.layers) - 1], elsewhere="none")
    for scheme in ("forget_gate", "pope", "xpos", "string"):
        with pytest.raises(UnsupportedError, match="reads the keys of an earlier layer"):
            patch_model(model, scheme)
        assert not hasattr(model, "position_encoding")
    patch_model(model, native_scheme(model))
