"""What `patch_model` promises whatever the scheme: bad input, failures, repetition, schedules, third parties."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_posenc
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
from hf_posenc.patching import Architecture, register_architecture
from hf_posenc.patching.place import install
from hf_posenc.schemes import BuildContext, DistanceBias, SchemeConfig, SchemeParts, register_scheme, registry
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, outputs, patched, tokens

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
        (ScheduleConfig(layers=(NoneConfig(),)), {}, "has 1 layers"),
    ],
)
def test_bad_input_teaches_and_leaves_the_model_alone(scheme: Any, options: dict[str, Any], message: str) -> None:
    model = patched("llama_gqa", None)
    stock = _logits(model)
    with pytest.raises((ValueError, TypeError), match=message):
        patch_model(model, scheme, **options)
    _assert_stock(model, stock)


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("llama_gqa", None)
    stock = _logits(model)
    original, calls = install._install_attention, []

    def fail_at_the_second_layer(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        original(*args)

    monkeypatch.setattr(install, "_install_attention", fail_at_the_second_layer)
    with pytest.raises(RuntimeError, match="out of memory"):
        patch_model(model, "alibi")
    _assert_stock(model, stock)
    monkeypatch.undo()
    patch_model(model, "t5")
    before = _logits(model)
    calls.clear()
    monkeypatch.setattr(install, "_install_attention", fail_at_the_second_layer)
    with pytest.raises(RuntimeError, match="out of memory"):
        patch_model(model, "alibi")
    monkeypatch.undo()
    assert model.position_encoding.config.name == "t5"
    assert torch.equal(_logits(model), before)
    unpatch_model(model)
    _assert_stock(model, stock)


def test_patching_again_replaces_and_undo_still_returns_to_stock() -> None:
    model = patched("bert", None)
    row = ARCHITECTURES["bert"]
    with torch.no_grad():
        stock = outputs(model, row, tokens())
        patch_model(patch_model(model, "alibi"), "rope")
        assert model.position_encoding.config.name == "rope"
        alone = outputs(patched("bert", "rope"), row, tokens())
        assert torch.equal(outputs(model, row, tokens()), alone)
        assert torch.equal(outputs(unpatch_model(unpatch_model(model)), row, tokens()), stock)


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


def test_a_third_party_scheme_needs_no_change_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))

    class Distance(DistanceBias):
        def forward(self, distance: Tensor) -> Tensor:
            return -0.5 * distance.abs().float().unsqueeze(0).expand(4, *distance.shape)

    @register_scheme
    @dataclass(frozen=True)
    class SteepConfig(SchemeConfig):
        name: ClassVar[str] = "steep_for_tests"

        def build(self, context: BuildContext) -> SchemeParts:
            return SchemeParts(logit_bias=Distance())

    model = patched("llama_gqa", "steep_for_tests")
    assert "steep_for_tests" in hf_posenc.list_schemes()
    assert distance(_logits(model), _logits(patched("llama_gqa", "none"))) > 1e-3


def test_a_declared_refusal_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("llama_gqa", None)
    stock = _logits(model)
    from hf_posenc.patching.anatomy.architectures import declaration

    monkeypatch.setattr(declaration, "_ARCHITECTURES", dict(declaration._ARCHITECTURES))
    register_architecture("llama", architecture=Architecture(unsupported="it was declared so."))
    with pytest.raises(UnsupportedError, match="it was declared so"):
        patch_model(model, "alibi")
    _assert_stock(model, stock)


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel"):
        patch_model(nn.Linear(2, 2), "alibi")


def test_constant_positions_under_layer_norm_warn_with_the_remedy() -> None:
    with pytest.warns(UserWarning, match="direction="):
        patch_model(ARCHITECTURES["bert"].build(), "integer")


def test_bias_on_a_flash_backend_is_refused() -> None:
    model = patched("llama_gqa", "t5")
    from transformers import AttentionInterface

    AttentionInterface.register("flash_for_tests", lambda *args, **kwargs: (args[1].transpose(1, 2), None))
    model.config._attn_implementation = "flash_for_tests"
    with pytest.raises(UnsupportedError, match="set_attn_implementation"):
        model(tokens())
    unpatch_model(model)


def test_a_path_around_the_attention_interface_is_refused() -> None:
    model = patched("gpt2", "alibi", reorder_and_upcast_attn=True)
    with pytest.raises(UnsupportedError, match="reorder_and_upcast_attn"):
        model(tokens())


def test_a_part_of_a_model_is_refused() -> None:
    model = patched("bart", None)
    with pytest.raises(UnsupportedError, match="Patch the whole model"):
        patch_model(model.model.encoder, "alibi")


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


def test_a_schedule_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 layers"):
        patch_model(patched("llama_gqa", None), ScheduleConfig(layers=[NoneConfig()] * 3))


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


def test_schedules_survive_json() -> None:
    from hf_posenc.schemes import scheme_from_dict

    config = ScheduleConfig(layers=(RopeConfig(theta=5e5, scaling=hf_posenc.LinearScaling(2.0)), NoneConfig()))
    assert scheme_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(ScheduleConfig(layers=list(config.layers)))
    assert "schedule" not in hf_posenc.list_schemes()


def test_layers_that_share_keys_need_one_rotation() -> None:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        vocab_size=96,
        vocab_size_per_layer_input=96,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    model = Gemma3nForCausalLM(config).eval()
    with pytest.raises(UnsupportedError, match="reads the keys of layer 0"):
        patch_model(model, "rope", layers=[2, 3], elsewhere="none")
    patch_model(model, native_scheme(model))


def test_a_forward_that_somebody_set_on_an_instance_is_not_passed_over() -> None:
    model = patched("llama_gqa", None)
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    stock = _logits(model)
    with pytest.raises(UnsupportedError, match="has a forward that another library"):
        patch_model(model, "alibi")
    assert torch.equal(_logits(model), stock)
    assert "forward" not in model.model.layers[0].self_attn.__dict__
    del attention.forward
    _assert_stock(unpatch_model(patch_model(model, "alibi")), stock)
