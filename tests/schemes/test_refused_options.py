"""Options that no scheme can have are refused by constructors, and those that do not fit a place when it is built.

The messages teach: they name the option, its value and what is expected. Of the refusals that all options of a type
share there is one; `test_option_limits.py` tries every option with values of another type, and finds missing limits
that a scheme cannot be built without.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    BuildContext,
    ClippedScaling,
    DynamicScaling,
    DynamicYarnScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    YarnScaling,
    get_scheme,
)

from .table import HEAD_DIM, HEADS, HIDDEN

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("integer", {"scale": "1"}, r"IntegerConfig\.scale is '1'; expected a finite number"),
    ("integer", {"scale": True}, "scale is True"),
    ("integer", {"scale": math.inf}, "scale is inf"),
    ("integer", {"scale": -1e300}, "at least -1000000.0 and at most 1000000.0"),
    ("integer", {"direction": "one"}, "Did you mean 'ones'"),
    ("integer", {"direction": None}, "Known: learned, one_hot, ones, random"),
    ("normalized_integer", {"subtract_one": 1}, "expected True or False"),
    ("normalized_integer", {"length": 0}, "length is 0; expected an integer at least 1"),
    ("binary", {"bits": 63}, "at most 62"),
    ("sinusoidal", {"base": 0}, "greater than 0"),
    ("sinusoidal", {"columns_first": True}, "no columns"),
    ("sinusoidal", {"axes": 4}, "axes is 4"),
    ("learned", {"offset": 2**63}, "an integer of 64 bits; expected an integer at least 0 and at most 1048576"),
    ("learned", {"grid": (4, 4), "num_positions": 16}, "num_positions is 16.*over the order of tokens"),
    ("learned", {"grid": (4, 4), "offset": 2}, "offset is 2"),
    ("learned", {"num_prefix_tokens": 1}, "num_prefix_tokens is 1.*over a grid"),
    ("learned", {"grid": (2**11, 2**11)}, "places; a table has at most"),
    ("learned", {"grid": (4, 4), "interpolation": "nearest", "antialias": True}, "neither antialias"),
    ("learned", {"grid": (2, 4, 4), "interpolation": "bilinear", "antialias": True}, "two axes"),
    ("alibi", {"axes": 2, "variant": "asymmetric"}, "no token is earlier"),
    ("alibi", {"axes": 2, "variant": "causal"}, "no token is earlier"),
    ("t5", {"max_distance": 10**400}, "an integer of 1329 bits; .* at least 2 and at most 2147483647"),
    ("t5", {"bidirectional": "yes"}, "True or False or None"),
    ("t5", {"num_buckets": 31, "bidirectional": True}, "even number"),
    ("t5", {"num_buckets": 32, "max_distance": 16, "bidirectional": False}, "expected more than 16"),
    ("t5", {"num_buckets": 32, "max_distance": 8, "bidirectional": True}, "expected more than 8"),
    ("t5", {"axes": 2, "bidirectional": False}, "no token is earlier"),
    ("t5", {"axes": 2, "num_buckets": 5}, "even number"),
    ("swin", {"grid": (4,)}, "2 to 3 integers"),
    ("swin", {"grid": (4000, 4000)}, "displacements; a table has at most"),
    ("log_cpb", {"limit": 0.0}, r"LogCpbConfig\.limit is 0\.0; .* at least 1e-06"),
    ("kerple", {"exponent": 1.0}, "variant 'log' has no exponent"),
    ("kerple", {"minimum": 0.0}, r"KerpleConfig.minimum is 0.0; expected a finite number at least 1e-06"),
    ("kerple", {"variant": "power", "exponent": 0.0}, "exponent is 0.0; .* at least 1e-06 and at most 2.0"),
    ("fire", {"initial_c": 0.0}, "initial_c is 0.0; expected a finite number at least 1e-06"),
    ("fire", {"initial_threshold": -1.0}, "initial_threshold is -1.0"),
    ("fire", {"epsilon": 0}, "epsilon is 0"),
    ("shaw", {"table": "sinusoidal", "max_distance": 8}, "applies to a learned table"),
    ("shaw", {"table": "wavelet", "max_distance_ahead": 0}, "applies to a learned table"),
    ("shaw", {"table": "wavelet", "per_head": True}, "applies to a learned table"),
    ("disentangled", {"max_distance": 0}, "max_distance is 0"),
    ("disentangled", {"max_distance": 2**16 + 1}, "max_distance is 65537"),
    ("disentangled", {"buckets": 2**16 + 1}, "buckets is 65537"),
    ("disentangled", {"buckets": 256, "max_distance": 129}, "max_distance is 129; expected more than 129"),
    ("wavelet", {"num_scales": 13}, "at most 12"),
    ("transformer_xl", {"base": 1e-30}, "base is 1e-30; expected at least 1e-18"),
    ("grape", {"initial_rate": 0}, "initial_rate is 0"),
    ("forget_gate", {"gate": "bias_only", "decay_times": (1.0, 0.0)}, "at least 0.1"),
    ("forget_gate", {"gate": "bias_only", "decay_times": (1.0, 2.0, 3.0)}, "expected two times"),
    ("forget_gate", {"gate": "bias_only", "decay_times": (100.0, 1.0)}, "the shortest first"),
    ("forget_gate", {"decay_times": (1.0, 2.0)}, "gate is 'content'"),
    ("forget_gate", {"gate": "bias_only", "initial_bias": 1.0, "decay_times": (1.0, 2.0)}, "initial_bias is"),
    ("ssmax", {"initial_scale": 0.0}, "initial_scale is 0.0; expected a finite number at least 1e-06"),
    ("ssmax", {"initial_scale": 0.5, "training_length": 50}, "initial_scale=0.5 and training_length=50"),
    ("log_n_scale", {"training_length": 1}, "training_length is 1; expected an integer at least 2"),
    ("llama4_scale", {"attention_scale": -0.1}, "attention_scale is -0.1"),
    ("llama4_scale", {"offset": 2}, "offset is 2; expected an integer at least 0 and at most 1"),
    ("rope", {"theta": "10000"}, r"RopeConfig\.theta is '10000'; expected a finite number greater than 0"),
    ("rope", {"theta": 0.0}, "greater than 0"),
    ("rope", {"theta": 10**10_000}, r"an integer of 33220 bits; .* at most 1e\+30"),
    ("rope", {"theta": 1e300}, r"theta is 1e\+300; expected a finite number greater than 0 and at most 1e\+30"),
    ("rope", {"theta": 1e-300}, "theta is 1e-300; expected at least 1e-18"),
    ("log_n_scale", {"yarn_weight": 0.0}, "yarn_weight is 0.0"),
    ("log_n_scale", {"yarn_weight": 0.1, "clamp": False}, "yarn_weight=0.1 and clamp=False.*beyond training_length"),
    ("rope", {"rotary_dim": 7}, "expected an even number"),
    ("rope", {"rotary_dim": 0}, "at least 2"),
    ("rope", {"partial_rotary_factor": 1.5}, "at most 1"),
    ("rope", {"rotary_dim": 8, "partial_rotary_factor": 0.5}, "both set the rotated width"),
    ("rope", {"inverse_frequencies": ()}, "sequence of 1 to 65536"),
    ("rope", {"inverse_frequencies": (1.0, "a")}, "sequence of 1 to 65536 finite numbers"),
    ("rope", {"inverse_frequencies": (1.0, 1e300)}, r"finite numbers, each at least 0 and at most 1e\+18"),
    ("rope", {"inverse_frequencies": (1.0, 0.5), "rotary_dim": 8}, "which rotate 4 dimensions"),
    ("rope", {"inverse_frequencies": (1.0,), "scaling": LinearScaling(2.0)}, "are not scaled"),
    ("rope", {"inverse_frequencies": (1.0, 0.5), "theta": 500.0}, r"both inverse_frequencies and theta=500\.0"),
    ("rope", {"attention_scaling": 0.0}, "at least 1e-06"),
    ("rope", {"scaling": {"factor": 2.0}}, "expected a scaling such as YarnScaling"),
    ("rope", {"scaling": 2.0}, "expected a scaling such as YarnScaling"),
    ("rope", {"scaling": {"type": "linar", "factor": 2.0}}, "Did you mean 'linear'"),
    ("rope", {"scaling": {"type": "linear", "facto": 2.0}}, "Did you mean 'factor'"),
    ("rope", {"scaling": {"type": "yarn"}}, "YarnScaling needs the options factor, original_max_positions"),
    ("rope", {"scaling": "yarnn"}, "Unknown type 'yarnn' of RopeScaling. Did you mean 'yarn'"),
    ("rope", {"scaling": "yarn"}, r"is 'yarn'.* give YarnScaling\(factor=\.\.\., original_max_positions=\.\.\.\)"),
    ("rope", {"scaling": {"rope_type": "yarn", "factor": 4.0}}, r"hf_posenc\.schemes\.from_rope_parameters"),
    ("p_rope", {"fraction": -0.1}, "at least 0"),
    ("p_rope", {"fraction": 1.1}, "at most 1"),
    ("xpos", {"origin": 40_000.0}, "expected at most 32695"),
    ("pope", {"theta": 1e-30}, "at least 1e-18"),
    ("string", {"variant": "circulant", "learned_frequencies": False}, "learns only frequencies"),
    ("string", {"variant": "circulant", "layout": "half"}, "layout is 'half'.*has no pairs"),
    ("hope", {"training_length": 6}, "at least 7"),
    ("hope", {"theta": 0.5}, "at least 1"),
    ("fope", {"gain": -1}, "at least 0"),
    ("resonance", {"scaling": 2.0}, "ResonanceConfig.scaling is 2.0"),
    ("resonance", {"scaling": "resonanc"}, "Did you mean 'resonance'"),
    *(("rope_nd", {"grid": grid}, "grid") for grid in ((), 4, (0,), (2.5,), (True,), (2, 2, 2))),
    ("rope_nd", {"layout": "half_by_axis", "assignment": "split"}, "no such blocks"),
    ("rope_nd", {"origin": 1, "coordinates": "normalized"}, "not counted"),
    ("rope_nd", {"assignment": "block", "per_head": False}, "per_head is False.*'block' are fixed"),
    *(("mrope", {"sections": sections}, "sections") for sections in ((1, 2), (1, 2, -1), 3, (1.0, 2, 1), (True, 2, 1))),
    ("mrope", {"inverse_frequencies": (1.0, 0.5), "theta": 500.0}, r"both inverse_frequencies and theta=500\.0"),
    ("mrope", {"by_head": True, "interleaved": True}, "no pairs to interleave"),
    ("position_scale", {"factor": 0}, "factor is 0"),
    ("position_scale", {"inner": {"scheme": "schedule", "layers": ["rope", "none"]}}, "inner must be the config of a"),
    ("randomized", {"max_position": 0}, "max_position is 0"),
    ("randomized", {"inner": 3}, "not a scheme"),
    ("hierarchical", {"separators": 13}, "separators is 13"),
    ("hierarchical", {"segment_length": 5, "separators": (13,)}, "segment_length"),
    ("hierarchical", {"separators": (-1,)}, r"separators is \(-1,\)"),
    ("dual_chunk", {"chunk_size": 2}, "chunk_size is 2; expected an integer at least 3"),
    ("dual_chunk", {"chunk_size": 1024}, "local_size is 1024, and chunk_size is 1024.*local_size of at most 511"),
    ("dual_chunk", {"chunk_size": 8, "local_size": 4}, "must be longer than local_size.*at most 3"),
    ("blended", {"old": "rope", "new": "alibi", "strength": -0.1}, "strength is -0.1"),
    ("blended", {"old": {"scheme": "interleaved"}, "new": "alibi"}, "scheme for one layer"),
    ("blended", {"old": {"scheme": "blended"}, "new": "alibi"}, "a blend itself"),
    ("composed", {"parts": ()}, "non-empty sequence"),
    ("composed", {"parts": (3,)}, "is not a scheme: 3; expected a config such as hf_posenc.AlibiConfig"),
    ("composed", {"parts": "alibi"}, "non-empty sequence"),
    ("composed", {"parts": ("alibbi",)}, "Did you mean 'alibi'"),
    ("schedule", {"layers": "rope"}, "at least one layer"),
    ("schedule", {"layers": ("interleaved",)}, "for one layer"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "options", "message"), REFUSED)
def test_options_are_refused(scheme: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_scheme(scheme).from_options(options)


@pytest.mark.parametrize("scheme", ["sinusoidal", "integer", "normalized_integer", "binary"])
@pytest.mark.parametrize("scale", [0, 0.0, -0.0])
def test_a_scale_of_zero_is_no_scheme(scheme: str, scale: float) -> None:
    with pytest.raises(ValueError, match=r"Config\.scale is .*other than 0.*'none'"):
        get_scheme(scheme)(scale=scale)  # type: ignore[call-arg]
    get_scheme(scheme)(scale=-0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling(0.5), "LinearScaling.factor is 0.5; expected a finite number at least 1"),
        (lambda: DynamicScaling(2.0, 0), "original_max_positions is 0; expected an integer at least 1"),
        (lambda: YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=2.0), "beta_fast is 1.0; expected more than"),
        (lambda: YarnScaling(2.0, 64).spectrum(1.0, 16), "theta greater than 1"),
        (lambda: DynamicYarnScaling(64, beta_slow=32.0), "DynamicYarnScaling.beta_fast is 32.0; expected more than"),
        (lambda: DynamicYarnScaling(64, 0.5), "factor is 0.5; expected a finite number at least 1"),
        (lambda: ClippedScaling(), "pairs=None and original_max_positions=None. Give one"),
        (lambda: ClippedScaling(4, 64), "pairs=4 and original_max_positions=64. Give one"),
        (lambda: ClippedScaling(1), "pairs is 1; expected an integer at least 2"),
        (lambda: ClippedScaling(original_max_positions=10**9).spectrum(1e4, 16), "changes nothing: 0 of the 8 pairs"),
        (lambda: ClippedScaling(original_max_positions=10**4).spectrum(1e4, 16), "changes nothing: 1 of the 8 pairs"),
        (lambda: Llama3Scaling(8.0, 4.0, 1.0), "high_freq_factor is 1.0; expected more than"),
        (lambda: LongRopeScaling((1.0,), (1.0, 2.0), 64), "1 short factors and 2 long ones"),
        (lambda: LongRopeScaling((), (), 64), "sequence of 1 to 65536"),
        (lambda: LongRopeScaling((0.0,), (1.0,), 64), "each at least 1e-06"),
        (lambda: LongRopeScaling((1.0,), (1.0,), 64).spectrum(1e4, 2), "factor is None .* attention_factor="),
    ],
)
def test_scalings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


PLACE = BuildContext(HIDDEN, HEADS, HEAD_DIM, causal=False, max_positions=64, num_key_value_heads=3)
ODD = {"hidden_size": 21, "num_heads": 3, "head_dim": 7}
CAUSAL = {"causal": True}


@pytest.mark.parametrize(
    ("scheme", "options", "place", "message"),
    [
        ("alibi", {"variant": "causal"}, {}, r"bidirectional.*'symmetric', 'asymmetric' or 'auto'"),
        ("alibi", {"variant": "asymmetric"}, CAUSAL, "'causal' or 'auto'"),
        ("alibi", {"variant": "asymmetric"}, {"num_heads": 1}, "at least 2 heads"),
        ("t5", {"bidirectional": False}, {}, "bidirectional is False.*this model is bidirectional"),
        ("t5", {"num_buckets": 2}, {}, "even number"),
        ("t5", {"max_distance": 16}, CAUSAL, "expected more than 16"),
        ("t5", {"max_distance": 8}, {}, "expected more than 8"),
        ("shaw", {"table": "sinusoidal"}, ODD, "odd width 7"),
        ("shaw", {"max_distance_ahead": 0}, CAUSAL, "max_distance_ahead is 0.*does not attend to them"),
        ("wavelet", {}, {"head_dim": 12}, "does not divide the head width of 12"),
        ("transformer_xl", {}, ODD, "hidden_size is 21"),
        ("learned", {}, {"max_positions": None}, "num_positions=2048"),
        ("binary", {"bits": 25}, {}, "positions would collide"),
        ("sinusoidal", {"frequencies": "tensor2tensor"}, {"hidden_size": 3}, "a hidden size of at least 4"),
        ("sinusoidal", {}, {"hidden_size": 1}, "a hidden size of at least 2"),
        ("sinusoidal", {"frequencies": "tensor2tensor", "axes": 3}, {"hidden_size": 8}, "at least 12"),
        ("log_n_scale", {}, {"max_positions": None}, "Give training_length in tokens"),
        *(
            (scheme, options, CAUSAL | {"head_dim": 15}, "would rotate 15 .*rotary_dim=14 or less")
            for scheme, options in (
                *((name, {}) for name in ("rope", "p_rope", "xpos", "learned_rope", "hope", "resonance", "fope")),
                *(("string", {"variant": variant}) for variant in ("cayley", "circulant")),
            )
        ),
        ("rope", {"rotary_dim": 18}, {}, "would rotate 18 .*rotary_dim=16 or less"),
        ("rope", {"partial_rotary_factor": 0.05}, {}, "leaves no pair"),
        ("rope", {"scaling": NtkScaling(2.0)}, {"head_dim": 2}, "rotary width of at least 4"),
        ("rope", {"scaling": LongRopeScaling((1.0,), (1.0,), 64, 2.0)}, {}, "16 rotated dimensions make 8 pairs"),
        *(
            ("rope_pp", {}, {"num_heads": heads, "num_key_value_heads": key_heads},
             f"{heads} query heads and {key_heads} key heads.*even number.*'rope'")
            for heads, key_heads in ((6, 2), (3, 3), (3, 1))
        ),
        ("string", {"variant": "circulant", "rotary_dim": 2}, {}, "rotary_dim=4 or more"),
        ("hope", {}, {"max_positions": None}, "Give training_length="),
        ("hope", {}, {"max_positions": 5}, "no pair completes"),
        ("fope", {}, {"max_positions": None}, "FopeConfig.training_length is None"),
        ("fope", {"gain": 30.0}, {}, "gain is 30.0, with which seed 0 .* smaller gain or another seed"),
        ("rope_nd", {"layout": "half_by_axis", "rotary_dim": 14}, {}, "equal blocks for 2 axes, but 14.*rotary_dim=12"),
        ("rope_nd", {"grid": (2, 2)}, {"head_dim": 4}, "fewer than its 3 axes"),
        ("mrope", {"sections": (2, 3, 2)}, {}, r"7 pairs, but 16 rotated dimensions have 8.*\(2, 3, 3\)"),
        ("mrope", {"sections": (2, 4, 2), "interleaved": True}, {}, "height gets 3 of its 4"),
        ("mrope", {"sections": (2, 1, 1), "by_head": True}, {}, "4 heads, but this model has 3 key heads"),
        ("mrope", {"by_head": True}, {"num_key_value_heads": 2}, "each of 3 axes a key head, but this model has 2"),
        ("hierarchical", {"within": "rope"}, {}, "within is 'rope'"),
        ("hierarchical", {"within": "none"}, {}, "within is 'none'"),
        ("hierarchical", {"segment": "sinusoidal"}, {}, "segment is 'sinusoidal'"),
        ("hierarchical", {"segment": "none"}, {}, "segment is 'none'"),
        ("position_shift", {"inner": "none"}, {}, "encodes no positions"),
        *(
            ("randomized", {"inner": inner}, {}, f"'{inner['scheme']}', which draws positions itself")
            for inner in (
                {"scheme": "randomized"},
                {"scheme": "position_shift", "inner": "randomized"},
                {"scheme": "hierarchical", "segment": "randomized"},
                {"scheme": "composed", "parts": ["sinusoidal", {"scheme": "randomized", "inner": "alibi"}]},
            )
        ),
        *(
            (scheme, {"inner": inner}, CAUSAL, message)
            for scheme in ("self_extend", "rerope", "dual_chunk")
            for inner, message in (
                ("sinusoidal", "'sinusoidal', which encodes no distances"),
                ("position_scale", "cannot be changed to other positions"),
                ("shaw", "depends on more than the distance"),
            )
        ),
        ("self_extend", {}, {}, "bidirectional"),
        ("rerope", {}, {}, "bidirectional"),
        ("attention_sinks", {"inner": "none"}, {}, "bidirectional"),
        ("attention_sinks", {"inner": "xpos"}, CAUSAL, "cannot be changed to other positions"),
        ("attention_sinks", {"inner": "shaw"}, CAUSAL, "depends on more than the distance"),
        ("dual_chunk", {}, {}, "DualChunkConfig only changes positions of past keys.*bidirectional"),
        ("rerope", {"inner": "t5", "window": 4, "factor": 2.0}, CAUSAL, "'t5', which needs integer positions"),
        ("composed", {"parts": ("rope", "p_rope")}, {}, r"2 schemes that map queries and keys \(rope, p_rope\)"),
    ],
)  # fmt: skip
def test_a_place_that_does_not_fit_is_refused(scheme: str, options: Any, place: Any, message: str) -> None:
    config = get_scheme(scheme).from_options(options)
    with pytest.raises((ValueError, UnsupportedError), match=message):
        config.build(dataclasses.replace(PLACE, **place))
