"""Maps of queries and keys beyond RoPE."""

from __future__ import annotations

from hf_posenc.schemes import DynamicScaling, LinearScaling, YarnScaling
from hf_posenc.schemes.rotary.fope import FopeConfig
from hf_posenc.schemes.rotary.hope import HopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceConfig
from hf_posenc.schemes.rotary.string import StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig

from ..references import rotations
from .row import Row

ROWS: dict[str, Row] = {
    "xpos": Row(
        "logits",
        rotations.xpos,
        (
            XposConfig(),
            XposConfig(theta=500.0, gamma=1.0, scale_base=20.0, origin=30.0, rotary_dim=12, layout="half"),
        ),
        causal_only=True,
        everywhere=True,
        marks="++++++.-+++",
        reach=(32695, 2338),
    ),
    "pope": Row(
        "logits",
        rotations.pope,
        (PopeConfig(), PopeConfig(theta=100.0)),
        everywhere=True,
        marks="++++++.-+++",
    ),
    "string": Row(
        "logits",
        rotations.string,
        (
            # Where training starts they are RoPE: another theta makes them differ from an architecture's own.
            StringConfig(theta=100.0),
            StringConfig(per_head=False, learned_frequencies=False, rotary_dim=12, layout="interleaved"),
            StringConfig(per_head=False),
            StringConfig("circulant"),
            StringConfig("circulant", per_head=False, rotary_dim=8),
        ),
        everywhere=True,
        marks="++++++.++++",
    ),
    "learned_rope": Row(
        "logits",
        rotations.learned_rope,
        (
            LearnedRopeConfig(theta=100.0),
            LearnedRopeConfig(sharing="layer", layout="interleaved"),
            LearnedRopeConfig(sharing="head", rotary_dim=8, layout="half"),
        ),
        marks="++++++.+-++",
    ),
    "hope": Row(
        "map",
        rotations.hope,
        # In 16 positions the second pair completes half a turn, but not a whole one.
        (HopeConfig(), HopeConfig(theta=500.0, training_length=16, rotary_dim=12, layout="interleaved")),
        marks="++++++.++++",
    ),
    "fope": Row(
        "logits",
        rotations.fope,
        (
            FopeConfig(),
            FopeConfig(theta=500.0, training_length=20, gain=0.6, seed=7, rotary_dim=12, layout="interleaved"),
            FopeConfig(learnable=True),
            FopeConfig(variant="released", training_length=20),
        ),
        of_start=True,
        marks="++--++.-+++",
    ),
    "resonance": Row(
        "map",
        rotations.resonance,
        (
            ResonanceConfig(),
            ResonanceConfig(theta=500.0, rotary_dim=12, layout="interleaved", scaling=LinearScaling(4.0)),
            ResonanceConfig(scaling=YarnScaling(4.0, 64, beta_fast=4.0)),
            ResonanceConfig(scaling=DynamicScaling(2.0, 20)),
        ),
        marks="++++++.++++",
    ),
}
