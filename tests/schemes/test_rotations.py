"""Maps beyond RoPE: special cases, declarations, and what their logits and norms depend on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.schemes import (
    DynamicScaling,
    PRopeConfig,
    RopeConfig,
    SchemeParts,
    YarnScaling,
    scheme_from_dict,
    to_rope_parameters,
)
from hf_posenc.schemes.rotary.fope import FopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceScaling
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig
from hf_posenc.schemes.rotary.string import StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig
from hf_posenc.schemes.scale.ssmax import SSMaxConfig

from .building import at, counted, logits_of, mapped, part_of, random_heads
from .table import HEAD_DIM, HEADS, KEY_VALUE_HEADS, context_for


def logits(parts: SchemeParts, ids: list[int]) -> Tensor:
    return logits_of(parts, at(ids))


def test_the_width_comes_from_the_config_then_the_architecture_then_the_head():
    for config, head_dim, rotary_dim, expected in (
        (RopeConfig(), 32, None, 32),
        (RopeConfig(), 32, 8, 8),
        (RopeConfig(rotary_dim=16), 32, 8, 16),
        (RopeConfig(partial_rotary_factor=0.4), 20, None, 8),
        (RopeConfig(partial_rotary_factor=0.35), 20, None, 6),
        (RopeConfig(inverse_frequencies=(1.0, 0.1)), 32, 8, 4),
        (PRopeConfig(), 32, 8, 8),
        # It needs no pairs.
        (PopeConfig(), 15, None, 15),
    ):
        assert part_of(config, head_dim=head_dim, rotary_dim=rotary_dim).rotary_dim == expected


def test_xpos_magnitudes_up_to_the_documented_limits():
    part = part_of(XposConfig())

    def key_magnitude(position: int) -> Tensor:
        cosine, sine = part.phases(at([position]))[2:]
        return torch.hypot(cosine, sine)

    key = torch.zeros(1, 1, 1, HEAD_DIM, dtype=torch.float16)
    key[..., 0] = 256.0

    def mapped_key(position: int) -> Tensor:
        return part.map_key(key, part.phases(at([position])))

    assert mapped_key(2247).isfinite().all()
    with pytest.raises(SequenceLengthError, match=r"float16.* up to position 2247"):
        mapped_key(2249)
    assert torch.isfinite(key_magnitude(32_000)).all()
    with pytest.raises(SequenceLengthError, match=r"length 40001 .* 32695 positions .* larger scale_base"):
        key_magnitude(40_000)
    at_origin = part_of(XposConfig(origin=20_000.0)).phases(at([20_000]))[2:]
    torch.testing.assert_close(torch.hypot(*at_origin), torch.ones_like(at_origin[0]))


def test_pope_clamps_its_phases_and_draws_them_where_asked():
    parts = PopeConfig().build(context_for(PopeConfig()))
    part = parts.query_key_map
    assert part.delta.shape == (KEY_VALUE_HEADS, HEAD_DIM)
    assert not part.delta.any()
    plain = logits(parts, [0, 3, 9])
    with torch.no_grad():
        part.delta.fill_(-9.0)
    # A whole turn back: -2 pi is 0.
    torch.testing.assert_close(logits(parts, [0, 3, 9]), plain, rtol=1e-5, atol=1e-5)
    uniform = part_of(PopeConfig(initial_delta="uniform")).delta
    assert -2 * math.pi <= uniform.min() < -5
    assert -1 < uniform.max() <= 0


@pytest.mark.parametrize("outside", [0.3, -7.0])
def test_phases_of_pope_outside_of_their_range_come_back(outside):
    part = part_of(PopeConfig())
    with torch.no_grad():
        part.delta.fill_(outside)
    query, key = random_heads(6)
    phases = part.phases(counted(6))
    keys = part.map_key(key, phases).repeat_interleave(HEADS // KEY_VALUE_HEADS, dim=1)
    loss = (part.map_query(query, phases) @ keys.transpose(-1, -2)).square().mean()
    # Away from the range nothing pulls; towards it every phase is pulled, whichever way the loss points.
    (down,) = torch.autograd.grad(loss, part.delta, retain_graph=True)
    (up,) = torch.autograd.grad(-loss, part.delta)
    back = outside > 0
    assert ((down >= 0) if back else (down <= 0)).all()
    assert ((up >= 0) if back else (up <= 0)).all()
    assert ((down != 0) ^ (up != 0)).all()


@pytest.mark.parametrize(
    ("config", "per_layer"),
    [
        (PopeConfig(), True),
        (SSMaxConfig(), True),
        (LearnedRopeConfig(), False),
        (LearnedRopeConfig(sharing="layer"), True),
        (StringConfig(), True),
        (FopeConfig(), False),
        (FopeConfig(learnable=True), True),
        (RopeNdConfig(grid=(4,), assignment="golden"), False),
        (RopeNdConfig(grid=(4,), assignment="mixed"), True),
    ],
    ids=repr,
)
def test_layers_have_parts_of_their_own_where_they_learn_them(config, per_layer):
    assert config.per_layer == per_layer


def test_resonance_is_a_scaling_that_wraps_another():
    assert RopeConfig(scaling="resonance") == RopeConfig(scaling=ResonanceScaling())  # type: ignore[arg-type]
    twice, once = (
        part_of(RopeConfig(scaling=one)) for one in (ResonanceScaling(ResonanceScaling()), ResonanceScaling())
    )
    assert all(map(torch.equal, mapped(twice, counted(40)), mapped(once, counted(40))))
    config = RopeConfig(scaling=ResonanceScaling(DynamicScaling(2.0, 20)))
    assert scheme_from_dict(config.to_dict()) == config
    part = part_of(config)
    assert part.length_dependent
    assert not part_of(RopeConfig(scaling=ResonanceScaling())).length_dependent
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        part.check_cache(10, 30)
    assert ResonanceScaling(YarnScaling(4.0, 64)).attention_scaling() == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(UnsupportedError, match="no type for the scaling 'resonance'"):
        to_rope_parameters(config, context_for(config))
