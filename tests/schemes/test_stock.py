"""`rope_parameters` to and from: what is written makes a stock rotary module compute the same phases."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXConfig, GPTNeoXRotaryEmbedding

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    BuildContext,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    PRopeConfig,
    RopeConfig,
    YarnScaling,
    from_rope_parameters,
    to_rope_parameters,
)

from .table import positions_of

HEAD_DIM = 24
CONTEXT = BuildContext(4 * HEAD_DIM, 4, HEAD_DIM, max_positions=128)
LONG = LongRopeScaling((1.0,) * 12, (2.0,) * 12, 64, factor=2.0)

EXPRESSIBLE = [
    RopeConfig(theta=5e5),
    RopeConfig(rotary_dim=14),
    RopeConfig(partial_rotary_factor=0.3),
    RopeConfig(scaling=LinearScaling(4.0)),
    RopeConfig(scaling=NtkScaling(4.0), rotary_dim=8),
    RopeConfig(scaling=DynamicScaling(2.0, 128)),
    # At the original length itself, the factor cancels out only up to rounding.
    RopeConfig(theta=100.0, scaling=DynamicScaling(8.49386653150895, 128), rotary_dim=4),
    RopeConfig(scaling=YarnScaling(4.0, 64, beta_fast=8.0)),
    RopeConfig(scaling=YarnScaling(4.0, 64, mscale=0.7, mscale_all_dim=1.0, truncate=False)),
    RopeConfig(scaling=YarnScaling(4.0, 64), attention_scaling=1.5),
    # The ramp ends behind the last dimension, and both of its ends at one pair.
    RopeConfig(theta=100.0, scaling=YarnScaling(4.0, 16384, 64.0, 0.25, mscale=0.0, mscale_all_dim=1.0)),
    RopeConfig(scaling=YarnScaling(8.0, 16, 3.5, 2.6, attention_factor=1.3), rotary_dim=4),
    RopeConfig(scaling=YarnScaling(8.0, 8192, mscale=0.5), rotary_dim=4),
    RopeConfig(scaling=LONG),
    RopeConfig(scaling=dataclasses.replace(LONG, attention_factor=1.25)),
    RopeConfig(scaling=LONG, attention_scaling=1.25),
    RopeConfig(scaling=LinearScaling(2.0), attention_scaling=1.0),
    RopeConfig(scaling=Llama3Scaling(8.0, original_max_positions=64)),
    RopeConfig(theta=100.0, scaling=Llama3Scaling(3.5, 0.5, 0.6, 16)),
    *(PRopeConfig(theta=1e6, fraction=fraction) for fraction in (0.0, 0.4, 0.75, 0.99, 1.0)),
]


@pytest.mark.parametrize("length", [32, 64, 65, 128, 129, 200])
@pytest.mark.parametrize("config", EXPRESSIBLE, ids=str)
def test_a_stock_module_computes_what_was_written(config, length):
    parameters = to_rope_parameters(config, CONTEXT)
    stock = GPTNeoXRotaryEmbedding(
        GPTNeoXConfig(
            hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=128, rope_parameters=parameters
        )
    )
    theirs = stock(torch.zeros(1), torch.arange(length).unsqueeze(0))
    for described in (config, from_rope_parameters(parameters, max_positions=128)):
        part = described.build(CONTEXT).query_key_map
        for value, expected in zip(part.phases(positions_of(length)), theirs, strict=True):
            assert torch.equal(value, expected)


# Among these are shares, such as 30 of 44, whose plain quotient times the head truncates to one less.
@pytest.mark.parametrize("head_dim", [44, 46, 49, 52, 64, 130])
def test_partial_factors_never_lose_a_dimension_to_rounding(head_dim):
    context = BuildContext(head_dim, 1, head_dim)
    for width in range(2, head_dim + 1, 2):
        parameters = to_rope_parameters(RopeConfig(rotary_dim=width), context)
        assert int(head_dim * parameters["partial_rotary_factor"]) == width
        assert from_rope_parameters(parameters).build(context).query_key_map.rotary_dim == width


def test_inferred_lengths_and_factors():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 32}
    assert from_rope_parameters(yarn, 128).scaling == YarnScaling(4.0, 32)
    assert from_rope_parameters({"type": "dynamic", "factor": 2.0}, 64).scaling == DynamicScaling(2.0, 64)
    assert from_rope_parameters({"rope_type": "default"}, default_theta=5e5) == RopeConfig(theta=5e5)
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    assert from_rope_parameters(long | {"original_max_position_embeddings": 32}, 128).scaling.factor == 4.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AlibiConfig(), "not 'alibi'"),
        (RopeConfig(inverse_frequencies=(1.0, 0.5)), "explicit inverse_frequencies"),
        (RopeConfig(scaling=DynamicScaling(2.0, 64)), "which is 128, but this scaling has 64"),
        (RopeConfig(attention_scaling=1.5), "only 'yarn' and 'longrope'"),
        (RopeConfig(scaling=LinearScaling(2.0), attention_scaling=1.5), "only 'yarn' and 'longrope'"),
        (PRopeConfig(rotary_dim=8), "whole head of 24 dimensions"),
    ],
)
def test_what_stock_parameters_cannot_say(config, message):
    with pytest.raises(UnsupportedError, match=message):
        to_rope_parameters(config, CONTEXT)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "axial"}, "type 'axial'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "'mrope_section'"),
        ({"rope_type": "linear"}, "lack 'factor'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings, which is not known"),
        ({"rope_type": "yarn", "factor": 2.0}, "lack 'original_max_position_embeddings'"),
        ({"rope_type": "proportional", "factor": 2.0}, "factor other than 1"),
    ],
)
def test_what_no_scheme_expresses(parameters, message):
    with pytest.raises(UnsupportedError, match=message):
        from_rope_parameters(parameters)
