"""Maps beyond RoPE: what they say of themselves, how they compose, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    BuildContext,
    DynamicScaling,
    RopeConfig,
    YarnScaling,
    scheme_from_dict,
    to_rope_parameters,
)
from hf_posenc.schemes.rotary.fope import FopeConfig
from hf_posenc.schemes.rotary.hope import HopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceConfig, ResonanceScaling
from hf_posenc.schemes.rotary.string import StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig

from .rotation_cases import RELATIVE, drawn, map_of
from .table import HEAD_DIM, KEY_VALUE_HEADS, context_for, positions_of

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("config", "rotary_dim", "symmetric", "whole_heads", "width_factor", "per_layer"),
    [
        (XposConfig(rotary_dim=8), 8, False, False, 1, False),
        (PopeConfig(), HEAD_DIM, False, True, 2, True),
        (LearnedRopeConfig(), HEAD_DIM, True, False, 1, False),
        (LearnedRopeConfig(sharing="layer"), HEAD_DIM, True, False, 1, True),
        (LearnedRopeConfig(sharing="head", rotary_dim=8), 8, True, True, 1, True),
        (StringConfig(rotary_dim=8), 8, True, True, 1, True),
        (StringConfig(per_head=False), HEAD_DIM, True, False, 1, True),
        (StringConfig("circulant"), HEAD_DIM, True, True, 1, True),
        (HopeConfig(), HEAD_DIM, True, False, 1, False),
        (FopeConfig(), HEAD_DIM, True, True, 1, False),
        (FopeConfig(learnable=True), HEAD_DIM, True, True, 1, True),
        (ResonanceConfig(), HEAD_DIM, True, False, 1, False),
    ],
    ids=repr,
)
def test_maps_say_what_they_do(config, rotary_dim, symmetric, whole_heads, width_factor, per_layer):
    parts = drawn(config)
    part = parts.query_key_map
    assert (part.rotary_dim, part.symmetric, part.whole_heads, part.width_factor) == (
        rotary_dim,
        symmetric,
        whole_heads,
        width_factor,
    )
    assert config.per_layer == per_layer
    x = torch.randn(1, KEY_VALUE_HEADS, 12, HEAD_DIM).bfloat16()
    phases = part.phases(positions_of(12))
    query, key = part.map_query(x, phases), part.map_key(x, phases)
    assert query.shape == key.shape == (1, KEY_VALUE_HEADS, 12, width_factor * HEAD_DIM)
    assert query.dtype == key.dtype == torch.bfloat16
    assert torch.equal(query, key) == (symmetric or (config.name == "pope" and not part.delta.any()))
    if width_factor == 1:
        assert torch.equal(query[..., rotary_dim:], x[..., rotary_dim:])
    heads_differ = any(phase.ndim == 4 for phase in phases) or (config.name == "string" and config.per_head)
    assert heads_differ == whole_heads


def test_resonance_is_a_scaling_that_wraps_another():
    assert RopeConfig(scaling="resonance") == RopeConfig(scaling=ResonanceScaling())  # type: ignore[arg-type]
    config = RopeConfig(scaling=ResonanceScaling(DynamicScaling(2.0, 20)))
    assert scheme_from_dict(config.to_dict()) == config
    part = map_of(config)
    assert part.length_dependent
    assert not map_of(RopeConfig(scaling=ResonanceScaling())).length_dependent
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        part.check_cache(10, 30)
    assert ResonanceScaling(YarnScaling(4.0, 64)).attention_scaling() == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(UnsupportedError, match="no type for the scaling 'resonance'"):
        to_rope_parameters(config, context_for(config))


@pytest.mark.parametrize("config", [*RELATIVE, FopeConfig()], ids=repr)
def test_odd_heads_are_refused_where_pairs_are_needed(config):
    config = dataclasses.replace(config, rotary_dim=None) if hasattr(config, "rotary_dim") else config
    context = BuildContext(60, 4, 15, max_positions=64)
    if config.name == "pope":
        assert map_of(config, context).rotary_dim == 15
    else:
        with pytest.raises(ValueError, match="would rotate 15"):
            map_of(config, context)
