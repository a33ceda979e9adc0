"""A scaling for the rotation that a model already has, without naming its options again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_posenc import (
    ClippedScaling,
    DynamicYarnScaling,
    LocalGlobalConfig,
    NativeConfig,
    ReRopeConfig,
    RopeConfig,
    ScheduleConfig,
    UnsupportedError,
    YarnScaling,
    patch_model,
    unpatch_model,
)
from hf_posenc.metrics.evaluation import measure_schemes
from hf_posenc.recipes import SchemePhases, begin_blend, set_blend_strength
from hf_posenc.schemes import DynamicScaling, LongRopeScaling, scheme_from_dict
from hf_posenc.schemes.registry import parse_scheme
from tests.kits.decoding import decoded
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


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "pad_token_id": 0}


@pytest.mark.parametrize(("name", "bases"), [("Gemma3ForCausalLM", (1e4, 1e6)), ("Olmo3ForCausalLM", (5e4, 5e4))])
def test_layers_with_a_window_keep_their_rotation_as_in_transformers(name: str, bases: tuple[float, float]) -> None:
    near, far = ({"rope_theta": base, "rope_type": "default"} for base in bases)
    scaled = {"sliding_attention": near, "full_attention": far | IN_TRANSFORMERS}
    model = built(name, rope_parameters={"sliding_attention": near, "full_attention": far}, **WINDOWS)
    patch_model(model, NativeConfig(scaling=YARN))
    found = [(layer.theta, layer.scaling) for layer in model.position_encoding.config.layers]
    assert found == [(bases[0], None), (bases[1], YARN)]
    expected = built(name, rope_parameters=scaled, **WINDOWS)
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=1e-5)


GEMMA3: tuple[str, dict[str, Any]] = ("Gemma3ForCausalLM", WINDOWS)
#: Class, options of its config, a scheme, options of the patch, and the scalings of the layers or of the parts.
PLACED: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any], list[Any]]] = {
    # A request for each layer applies to every layer.
    "local and global": (*GEMMA3, LocalGlobalConfig(NativeConfig(YARN), NativeConfig()), {}, [YARN, None]),
    "a schedule": (*GEMMA3, ScheduleConfig((NativeConfig(YARN), NativeConfig())), {}, [YARN, None]),
    "some layers": (*GEMMA3, NativeConfig(YARN), {"layers": [1], "elsewhere": "none"}, [None, YARN]),
    "a layer without rotation": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0], "num_hidden_layers": 2, "pad_token_id": 0},
        NativeConfig(YARN),
        {},
        [YARN, None],
    ),
    "inside another scheme": ("LlamaForCausalLM", {}, [NativeConfig(YARN), "ssmax"], {}, [YARN, None]),
}


@pytest.mark.parametrize("place", PLACED)
def test_it_stands_where_it_was_put(place: str) -> None:
    name, settings, scheme, options, expected = PLACED[place]
    config = patch_model(built(name, **settings), scheme, **options).position_encoding.config
    assert [getattr(one, "scaling", None) for one in getattr(config, "layers", None) or config.parts] == expected


def test_the_phases_of_a_training_may_have_it() -> None:
    model = built("LlamaForCausalLM")
    phases = SchemePhases(((0, NativeConfig(YARN)), (2, "none"), (3, NativeConfig(YARN))))
    assert [phases.apply(model, step) for step in range(5)] == [True, False, True, True, False]
    assert model.position_encoding.config.scaling == YARN


def test_an_evaluation_records_the_options_of_the_model() -> None:
    model = built("LlamaForCausalLM", rope_parameters={"rope_theta": 5e4, "rope_type": "default"})
    (subject,), _ = measure_schemes(model, [NativeConfig(YARN)], lambda patched: [])
    assert (subject.label, subject.scheme) == ("native(yarn x4)", "rope")
    assert subject.config is not None
    assert subject.config["theta"] == 5e4


def test_it_is_written_as_other_schemes_are() -> None:
    text = 'native:scaling={"type":"yarn","factor":4.0,"original_max_positions":32}'
    assert parse_scheme(text) == NativeConfig(YARN)
    assert scheme_from_dict(NativeConfig(YARN).to_dict()) == NativeConfig(YARN)
    assert NativeConfig(YARN).label == "native(yarn x4)"
    with pytest.raises(ValueError, match=r"NativeConfig\.scaling"):
        NativeConfig(scaling="yarn")  # type: ignore[arg-type]


#: Scalings whose spectrum no other test places in a model.
NEW = {
    "dynamic_yarn": DynamicYarnScaling(32),
    "dynamic_yarn, trained": DynamicYarnScaling(16, 2.0),
    "clipped": ClippedScaling(3),
    "clipped dynamic_yarn": ClippedScaling(3, scaling=DynamicYarnScaling(32)),
}


@pytest.mark.parametrize("name", NEW)
def test_a_scaling_survives_decoding_padding_saving_and_undoing(name: str, tmp_path: Path) -> None:
    model = built("LlamaForCausalLM")
    before = logits(model)
    patch_model(model, NativeConfig(scaling=NEW[name]))
    whole = logits(model)
    assert (whole - before).abs().max() > 1e-3
    torch.manual_seed(1)
    ids = torch.randint(1, 60, (1, 100))
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        steps = decoded(model, ids, cache, [20] + [1] * 12)
        torch.testing.assert_close(steps, model(ids[:, :32], use_cache=False).logits, rtol=0, atol=1e-4)
        if "dynamic" in name:
            with pytest.raises(UnsupportedError, match="Dynamic YaRN changes the frequencies of all 32 cached keys"):
                model(ids[:, 32:40], past_key_values=cache)
        # A short row keeps its own frequencies beside a long one.
        padded = torch.cat((ids, torch.cat((torch.zeros(1, 70, dtype=torch.int64), ids[:, :30]), dim=1)))
        both = model(padded, attention_mask=(padded > 0).long(), use_cache=False).logits
        torch.testing.assert_close(both[:1], whole, rtol=0, atol=1e-4)
        torch.testing.assert_close(both[1, 70:], model(ids[:, :30]).logits[0], rtol=0, atol=1e-4)
        longer = model.generate(ids[:, :30], max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=False)
        assert longer.shape == (1, 36)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), whole)
    assert torch.equal(logits(unpatch_model(model)), before)


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicScaling(2.0, 16),
        DynamicYarnScaling(16),
        LongRopeScaling((1.0, 1.0, 1.5, 2.0), (2.0, 3.0, 4.0, 8.0), 16, factor=2.0),
    ],
)
@torch.no_grad()
def test_a_cache_grows_as_long_as_the_frequencies_of_each_row_stay(scaling: Any) -> None:
    """Padding does not count, and a given position counts for all tokens before it."""
    model = patch_model(built("LlamaForCausalLM"), NativeConfig(scaling=scaling))
    ids, mask = torch.randint(1, 60, (2, 26)), torch.ones(2, 26, dtype=torch.int64)
    mask[0, :8], mask[1, :9] = 0, 0
    real = mask[:, :24].bool()
    whole = model(ids[:, :24], attention_mask=mask[:, :24], use_cache=False).logits
    cache = DynamicCache()
    steps = decoded(model, ids, cache, [20, 1, 1, 2], attention_mask=mask)
    torch.testing.assert_close(steps[real], whole[real], rtol=0, atol=1e-4)
    with pytest.raises(UnsupportedError, match=r"(the|all) 16 cached keys"):
        model(ids[:, 24:25], attention_mask=mask[:, :25], past_key_values=cache)
    cache = DynamicCache()
    decoded(model, ids, cache, [5])
    with pytest.raises(UnsupportedError, match=r"5 cached keys.* 31"):
        model(ids[:, 5:6], position_ids=torch.full((2, 1), 30), past_key_values=cache)


def blended(model: Any, scaling: Any) -> None:
    begin_blend(model, NativeConfig(scaling=scaling))
    set_blend_strength(model, 0.3)


def with_far_keys(model: Any, scaling: Any) -> None:
    patch_model(model, ReRopeConfig(inner=RopeConfig(scaling=scaling), window=10))


@pytest.mark.parametrize("place", [blended, with_far_keys])
def test_a_temperature_of_the_length_is_that_of_a_text(place: Any) -> None:
    """Where a blend has a power of the factor of each rotation, and where far keys are turned again."""
    found = []
    for scaling in (DynamicYarnScaling(25), YarnScaling(4.0, 25)):
        model = built("LlamaForCausalLM")
        place(model, scaling)
        found.append(logits(model, 100))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
