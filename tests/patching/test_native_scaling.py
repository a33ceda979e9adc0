"""A scaling for the rotation that a model already has, without naming its options again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_posenc import (
    LinearScaling,
    NativeConfig,
    RopeConfig,
    ScheduleConfig,
    YarnScaling,
    get_scheme,
    native_scheme,
    patch_model,
)
from hf_posenc.cli.options import parse_scheme
from hf_posenc.schemes import scheme_from_dict
from hf_posenc.schemes.labels import scheme_label
from tests.models import tiny

YARN = YarnScaling(factor=4.0, original_max_positions=32)
IN_TRANSFORMERS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def built(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    # Weights large enough for positions to matter.
    return tiny(name, initializer_range=0.2, **options).eval()


@torch.no_grad()
def logits(model: Any, length: int = 100) -> torch.Tensor:
    torch.manual_seed(1)
    found: torch.Tensor = model(torch.randint(1, 60, (1, length))).logits
    return found


def test_it_is_the_scaling_of_transformers_with_the_other_options_of_the_model() -> None:
    stock = {"rope_theta": 5e4, "rope_type": "default"}
    expected = logits(built("LlamaForCausalLM", rope_parameters=stock | IN_TRANSFORMERS))
    model = patch_model(built("LlamaForCausalLM", rope_parameters=stock), NativeConfig(scaling=YARN))
    config = model.position_encoding.config
    assert isinstance(config, RopeConfig)
    assert (config.theta, config.scaling) == (5e4, YARN)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert (logits(built("LlamaForCausalLM", rope_parameters=stock)) - expected).abs().max() > 1e-3


def test_it_takes_the_place_of_the_scaling_that_the_model_has() -> None:
    model = built("LlamaForCausalLM", rope_parameters={"rope_theta": 5e4, "rope_type": "linear", "factor": 2.0})
    own = native_scheme(model)
    assert own.scaling == LinearScaling(2.0)
    patch_model(model, "native", scaling=YARN)
    assert model.position_encoding.config == replace(own, scaling=YARN)


def test_layers_with_a_window_and_rotations_of_their_own_keep_them() -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    near = {"rope_theta": 1e4, "rope_type": "default"}
    far = {"rope_theta": 1e6, "rope_type": "default"}
    expected = built(
        "Gemma3ForCausalLM",
        rope_parameters={"sliding_attention": near, "full_attention": far | IN_TRANSFORMERS},
        **types,
    )
    own = {"sliding_attention": near, "full_attention": far}
    model = built("Gemma3ForCausalLM", rope_parameters=own, **types)
    patch_model(model, NativeConfig(scaling=YARN))
    local, everywhere = model.position_encoding.config.layers
    assert (local.theta, local.scaling) == (1e4, None)
    assert (everywhere.theta, everywhere.scaling) == (1e6, YARN)
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=1e-5)


def test_layers_without_rotation_stay_so() -> None:
    model = built("SmolLM3ForCausalLM", no_rope_layers=[1, 0], num_hidden_layers=2, pad_token_id=0)
    patch_model(model, NativeConfig(scaling=YARN))
    rotated, none = model.position_encoding.config.layers
    assert isinstance(model.position_encoding.config, ScheduleConfig)
    assert rotated.scaling == YARN
    assert none == get_scheme("none")()


def test_it_can_stand_inside_another_scheme() -> None:
    model = patch_model(built("LlamaForCausalLM"), [NativeConfig(YARN), "ssmax"])
    rotation, scale = model.position_encoding.config.parts
    assert rotation.scaling == YARN
    assert scale.name == "ssmax"


@pytest.mark.parametrize("scheme", [NativeConfig(YARN), [NativeConfig(YARN), "alibi"]])
def test_a_model_without_rope_is_refused_and_left_alone(scheme: Any) -> None:
    model = built("GPT2LMHeadModel")
    with pytest.raises(ValueError, match="for RoPE, and the native scheme of this model is 'learned"):
        patch_model(model, scheme)
    assert getattr(model, "position_encoding", None) is None


def test_it_is_written_as_other_schemes_are() -> None:
    text = 'native:scaling={"type":"yarn","factor":4.0,"original_max_positions":32}'
    assert parse_scheme(text) == NativeConfig(YARN)
    assert scheme_from_dict(NativeConfig(YARN).to_dict()) == NativeConfig(YARN)
    assert scheme_label(NativeConfig(YARN)) == "native(yarn x4)"
    with pytest.raises(ValueError, match=r"NativeConfig\.scaling"):
        NativeConfig(scaling="yarn")  # type: ignore[arg-type]
