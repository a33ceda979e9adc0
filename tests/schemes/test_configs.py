"""Bad options are refused by the constructors, with messages that teach; composed schemes; registration."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, make_dataclass
from typing import ClassVar

import pytest
import torch

import hf_posenc
from hf_posenc import other_names, patch_model
from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.recipes import swap_scheme
from hf_posenc.schemes import (
    AlibiConfig,
    BuildContext,
    ComposedConfig,
    IntegerConfig,
    InterleavedConfig,
    LearnedConfig,
    LocalGlobalConfig,
    NoneConfig,
    NormalizedIntegerConfig,
    Positions,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    SelfExtendConfig,
    SinusoidalConfig,
    T5Config,
    as_scheme,
    get_scheme,
    list_schemes,
    register_scheme,
    registry as registry_module,
    scheme_from_dict,
)
from hf_posenc.schemes.config import required_options
from hf_posenc.schemes.rotary.scaling import RopeScaling

from .table import positions_of

CONTEXT = BuildContext(24, 4, 6, max_positions=32)


def test_the_smallest_base_is_finite_at_every_position():
    ids = torch.tensor([[0, 1, 2**62]])
    part = RopeConfig(theta=1e-18, rotary_dim=6).build(CONTEXT).query_key_map
    assert all(phase.isfinite().all() for phase in part.phases(Positions(ids, ids[:, -1:] + 1)))
    assert LearnedConfig(offset=2**20).offset == 2**20


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("ALiBi", "Did you mean 'alibi'? All"),
        ("NoPE", "Did you mean 'none'?"),
        ("rnope", "Did you mean 'interleaved'?"),
        ("relative", "Did you mean 'shaw' or 't5'"),
        ("t5_bias", "Did you mean 't5'?"),
        ("alibi + rope", 'Several schemes at once are a list: ["alibi", "rope"].'),
        ("Rotary-Position-Embedding", "Did you mean 'rope'?"),
        ("yarn", """'native' (for a trained model with RoPE) and of 'rope': scaling={"type": "yarn", "factor": ..."""),
        ("pi", 'scaling={"type": "linear", "factor": ...}'),
        ("drope", "hf_posenc.recipes.drope(total_steps)"),
    ],
)
def test_words_of_the_field_lead_to_the_scheme(word, hint):
    with pytest.raises(UnknownNameError) as caught:
        get_scheme(word)
    assert f"Unknown scheme '{word}'. " in str(caught.value)
    assert hint in str(caught.value)


def test_another_name_of_an_option_leads_to_the_option():
    for scheme, option, meant in (("rope", "base", "theta"), ("learned", "max_position_embeddings", "num_positions")):
        with pytest.raises(UnknownNameError, match=f"Unknown option '{option}' .* Did you mean '{meant}'"):
            as_scheme(scheme, **{option: 100})


def test_a_misspelt_argument_of_patch_model_leads_to_the_argument():
    for scheme in ("alibi", "alibi:learnable=True", {"scheme": "alibi"}, AlibiConfig(), ["alibi", "rope"]):
        with pytest.raises((UnknownNameError, TypeError), match=r"'layers'\? .* argument: layers=.*--scheme_layers"):
            as_scheme(scheme, layer=[0])
    with pytest.raises(UnknownNameError, match="Did you mean 'parts'"):
        as_scheme("composed", partss=["alibi"])
    for function in (patch_model, swap_scheme):
        assert other_names._ARGUMENTS.keys() >= set(inspect.getfullargspec(function).kwonlyargs)


def test_every_hint_names_something_that_exists_with_the_options_it_needs():
    for kind, *options in other_names._SCALINGS.values():
        assert options == required_options(RopeScaling.type_named(kind))
    for names in other_names._SCHEMES.values():
        for name in names:
            get_scheme(name)
    taken = (set(other_names._SCHEMES) | set(other_names._SCALINGS)) & set(registry_module._SCHEMES)
    assert taken == set(), "a scheme of that name hides the hint"
    assert all(other_names.hint_for(word) for word in other_names._SCALINGS)


def test_schemes_are_nested_by_name_dictionary_class_and_list():
    both = ComposedConfig((T5Config(), RopeConfig()))
    assert ComposedConfig(("t5", RopeConfig)) == both
    assert ComposedConfig([{"scheme": "t5"}, "rope"]) == both
    assert SelfExtendConfig(inner=["t5", "rope"]).inner == both
    assert InterleavedConfig(inner=["t5", "rope"], other="alibi") == InterleavedConfig(both, AlibiConfig())
    assert ScheduleConfig([["t5", "rope"], "none"]) == ScheduleConfig((both, NoneConfig()))
    assert scheme_from_dict({"scheme": "composed", "parts": ["t5", "rope"]}) == both


@pytest.mark.parametrize(
    ("layered", "example"),
    [
        (InterleavedConfig(), "InterleavedConfig(inner=ComposedConfig((RopeConfig(), AlibiConfig())))"),
        (LocalGlobalConfig(), "LocalGlobalConfig(local=ComposedConfig((RopeConfig(), AlibiConfig())))"),
        (ScheduleConfig(("none", "rope")), "ScheduleConfig(layers=(AlibiConfig(), ...))"),
    ],
)
def test_an_arrangement_of_layers_is_composed_inside(layered, example):
    for parts in ((layered, "alibi"), ("alibi", layered)):
        with pytest.raises(ValueError, match="Compose inside its layers") as caught:
            ComposedConfig(parts)
        assert example in str(caught.value)


def test_third_parties_register_with_one_decorator(monkeypatch):
    monkeypatch.setattr(registry_module, "_SCHEMES", dict(registry_module._SCHEMES))

    @register_scheme
    @dataclass(frozen=True)
    class OwnConfig(SchemeConfig):
        name: ClassVar[str] = "own_scheme"
        strength: float = 2.0

    assert scheme_from_dict({"scheme": "own_scheme", "strength": 3.0}) == OwnConfig(3.0)
    assert "own_scheme" in registry_module.list_schemes()
    with pytest.raises(ValueError, match="already belongs to"):
        register_scheme(type("Other", (SchemeConfig,), {"name": "own_scheme"}))
    with pytest.raises(ValueError, match="lower-case identifier"):
        register_scheme(type("Loud", (SchemeConfig,), {"name": "Loud"}))


def test_children_are_replaced_by_their_place():
    schedule = ScheduleConfig(("rope", "alibi"))
    assert schedule.with_children({"layers[1]": T5Config()}) == ScheduleConfig(("rope", "t5"))
    assert SelfExtendConfig().with_children({"inner": AlibiConfig()}) == SelfExtendConfig("alibi")
    assert schedule.with_children(schedule.children()) is schedule


def test_composed_parts_add_up():
    torch.manual_seed(0)
    schemes = (SinusoidalConfig(), LearnedConfig(), RopeConfig(), AlibiConfig(), T5Config(), NoneConfig())
    parts = ComposedConfig(schemes).build(CONTEXT)
    torch.manual_seed(0)
    alone = [scheme.build(CONTEXT) for scheme in schemes]
    positions, distance = positions_of(9), torch.arange(-9, 1)
    assert torch.equal(parts.additive(positions), alone[0].additive(positions) + alone[1].additive(positions))
    assert torch.equal(parts.logit_bias(distance), alone[3].logit_bias(distance) + alone[4].logit_bias(distance))
    assert torch.equal(parts.query_key_map.phases(positions)[0], alone[2].query_key_map.phases(positions)[0])
    assert {name for name, _ in parts.additive.named_parameters()} == {"parts.1.weight"}


def test_composed_passes_on_what_its_parts_say():
    config = ComposedConfig((SinusoidalConfig(), NormalizedIntegerConfig(), T5Config(shared=False)))
    assert config.per_layer
    assert config.invisible_under_layer_norm
    assert not ComposedConfig((SinusoidalConfig(), T5Config())).per_layer
    assert not ComposedConfig((SinusoidalConfig(), IntegerConfig(direction="one_hot"))).invisible_under_layer_norm
    additive = config.build(CONTEXT).additive
    assert additive.length_dependent
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        additive.check_cache(3, 4)

    biases = ComposedConfig((AlibiConfig(), T5Config())).build(CONTEXT).logit_bias
    native = torch.randn(32, 4)
    assert not biases.length_dependent
    assert biases.adopt(native)
    assert torch.equal(biases.parts[1].weight, native)
    assert not biases.adopt(torch.randn(3, 4))


@pytest.mark.parametrize("option", ["scheme", "type", "label", "part_names", "has_parts", "stands_for_native"])
def test_an_option_cannot_be_called_like_what_every_config_has(option):
    """It would hide the attribute: a config with the option `has_parts=False` would place nothing."""
    confusing = make_dataclass(
        "Confusing", [(option, int, 1)], bases=(SchemeConfig,), frozen=True, namespace={"name": "confusing"}
    )
    with pytest.raises(ValueError, match=f"option called '{option}'"):
        register_scheme(confusing)
    assert "confusing" not in list_schemes()


@pytest.mark.parametrize(
    ("kind", "limits", "message"),
    [
        (int, {"min": 2}, "unexpected keyword argument 'min'.*minimum, maximum, even"),
        (str, {}, "missing a required argument: 'choices'"),
        (bytes, {}, "which has no check"),
    ],
)
def test_limits_that_no_check_takes_are_refused_where_an_option_is_declared(kind, limits, message):
    fields = [("size", kind, hf_posenc.option(kind(), **limits))]
    limited = make_dataclass("Limited", fields, bases=(SchemeConfig,), frozen=True, namespace={"name": "limited"})
    with pytest.raises(ValueError, match=f"Limited.size.*{message}"):
        register_scheme(limited)
    assert "limited" not in list_schemes()
