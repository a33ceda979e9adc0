"""Bad options are refused by the constructors, with messages that teach; composed schemes; registration."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import ClassVar

import pytest
import torch

from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    BinaryConfig,
    BuildContext,
    ComposedConfig,
    IntegerConfig,
    LearnedConfig,
    LinearScaling,
    NoneConfig,
    NormalizedIntegerConfig,
    PRopeConfig,
    RopeConfig,
    SchemeConfig,
    SinusoidalConfig,
    T5Config,
    get_scheme,
    list_schemes,
    register_scheme,
    scheme_from_dict,
)
from hf_posenc.schemes import registry as registry_module

from .table import positions_of

CONTEXT = BuildContext(24, 4, 6, max_positions=32)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (IntegerConfig, {"scale": "1"}, r"IntegerConfig\.scale is '1'; expected a finite number"),
        (IntegerConfig, {"scale": True}, "scale is True"),
        (IntegerConfig, {"scale": float("inf")}, "scale is inf"),
        (IntegerConfig, {"direction": "one"}, "Did you mean 'ones'"),
        (IntegerConfig, {"direction": None}, "Known: learned, one_hot, ones, random"),
        (NormalizedIntegerConfig, {"length": 0}, "length is 0; expected an integer at least 1"),
        (NormalizedIntegerConfig, {"length": 8.0}, "length is 8.0; expected an integer"),
        (NormalizedIntegerConfig, {"subtract_one": 1}, "expected True or False"),
        (BinaryConfig, {"bits": 0}, "bits is 0"),
        (BinaryConfig, {"bits": 63}, "at most 62"),
        (BinaryConfig, {"bits": True}, "bits is True"),
        (SinusoidalConfig, {"frequencies": "vaswany"}, "Did you mean 'vaswani'"),
        (SinusoidalConfig, {"layout": "concat"}, "Did you mean 'concatenated'"),
        (SinusoidalConfig, {"base": 0}, "greater than 0"),
        (SinusoidalConfig, {"offset": -1}, "at least 0"),
        (LearnedConfig, {"num_positions": 0}, "at least 1"),
        (LearnedConfig, {"offset": -2}, "at least 0"),
        (LearnedConfig, {"extension": "interpolation"}, "Did you mean 'interpolate'"),
        (T5Config, {"num_buckets": 1}, "at least 2"),
        (T5Config, {"bidirectional": "yes"}, "True or False or None"),
        (T5Config, {"shared": None}, "True or False"),
        (AlibiConfig, {"variant": "symetric"}, "Did you mean 'symmetric'"),
        (AlibiConfig, {"learnable": 0}, "True or False"),
        (RopeConfig, {"theta": "10000"}, r"RopeConfig\.theta is '10000'; expected a finite number greater than 0"),
        (RopeConfig, {"theta": True}, "theta is True"),
        (RopeConfig, {"theta": float("nan")}, "theta is nan"),
        (RopeConfig, {"theta": 0.0}, "greater than 0"),
        (RopeConfig, {"rotary_dim": 7}, "expected an even number"),
        (RopeConfig, {"rotary_dim": 0}, "at least 2"),
        (RopeConfig, {"partial_rotary_factor": 1.5}, "at most 1"),
        (RopeConfig, {"rotary_dim": 8, "partial_rotary_factor": 0.5}, "say the same thing"),
        (RopeConfig, {"layout": "interleave"}, "Did you mean 'interleaved'"),
        (RopeConfig, {"scaling": {"factor": 2.0}}, "expected a scaling such as YarnScaling"),
        (RopeConfig, {"scaling": 2.0}, "expected a scaling such as YarnScaling"),
        (RopeConfig, {"scaling": {"type": "linar", "factor": 2.0}}, "Did you mean 'linear'"),
        (RopeConfig, {"scaling": {"type": "linear", "facto": 2.0}}, "Did you mean 'factor'"),
        (RopeConfig, {"inverse_frequencies": ()}, "non-empty sequence"),
        (RopeConfig, {"inverse_frequencies": (1.0, "a")}, "non-empty sequence of finite numbers"),
        (RopeConfig, {"inverse_frequencies": (1.0, 0.5), "rotary_dim": 8}, "which rotate 4 dimensions"),
        (RopeConfig, {"inverse_frequencies": (1.0,), "scaling": LinearScaling(2.0)}, "nothing to scale"),
        (RopeConfig, {"attention_scaling": 0.0}, "greater than 0"),
        (PRopeConfig, {"fraction": -0.1}, "at least 0"),
        (PRopeConfig, {"fraction": 1.1}, "at most 1"),
        (PRopeConfig, {"rotary_dim": 3}, "even number"),
        (PRopeConfig, {"layout": "halves"}, "Known: auto, half, half_reversed, interleaved"),
        (ComposedConfig, {"parts": ()}, "non-empty sequence"),
        (ComposedConfig, {"parts": ("alibi",)}, "expected scheme configs, for example AlibiConfig"),
    ],
)
def test_bad_options_are_refused(scheme, options, message):
    with pytest.raises(ValueError, match=message):
        scheme.from_options(options)


def test_lists_become_tuples():
    config = RopeConfig(inverse_frequencies=[1.0, 0.5])
    assert config.inverse_frequencies == (1.0, 0.5)
    assert hash(config) == hash(RopeConfig(inverse_frequencies=(1.0, 0.5)))
    assert hash(ComposedConfig([AlibiConfig()])) == hash(ComposedConfig((AlibiConfig(),)))


def test_unknown_schemes_are_refused_with_a_hint():
    with pytest.raises(UnknownNameError, match="Did you mean 'sinusoidal'"):
        get_scheme("sinusoid")
    with pytest.raises(UnknownNameError, match="Unknown scheme 'nope'"):
        scheme_from_dict({"scheme": "nope"})
    with pytest.raises(ValueError, match="'scheme' key is expected"):
        scheme_from_dict({"theta": 1.0})


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


def test_composed_keeps_single_parts_and_absent_ones():
    parts = ComposedConfig((SinusoidalConfig(), AlibiConfig())).build(CONTEXT)
    assert type(parts.additive).__name__ == "SinusoidalEncoding"
    assert type(parts.logit_bias).__name__ == "AlibiBias"
    assert parts.query_key_map is None
    assert list(ComposedConfig((NoneConfig(),)).build(CONTEXT)) == []


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


def test_composed_refuses_two_maps_and_nesting():
    with pytest.raises(ValueError, match=r"2 schemes that map queries and keys \(rope, p_rope\)"):
        ComposedConfig((RopeConfig(), PRopeConfig())).build(CONTEXT)
    with pytest.raises(ValueError, match="list its parts directly"):
        ComposedConfig((ComposedConfig((AlibiConfig(),)),))


@pytest.mark.parametrize("option", ["scheme", "type"])
def test_an_option_cannot_be_called_like_a_key_of_the_json_form(option):
    confusing = make_dataclass(
        "Confusing", [(option, int, 1)], bases=(SchemeConfig,), frozen=True, namespace={"name": "confusing"}
    )
    with pytest.raises(ValueError, match=f"option called '{option}'"):
        register_scheme(confusing)
    assert "confusing" not in list_schemes()
