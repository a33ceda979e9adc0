"""Rotations over several axes."""

from __future__ import annotations

from hf_posenc.schemes.rotary.mrope import MRopeConfig
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig

from ..references import coordinates
from .row import Row

ROWS: dict[str, Row] = {
    "rope_nd": Row(
        "logits",
        coordinates.rope_nd,
        (
            RopeNdConfig(grid=(4,), layout="half"),
            RopeNdConfig(10_000.0, (5,), "split", layout="interleaved"),
            RopeNdConfig(50.0, (3, 4), "interleaved", rotary_dim=14, layout="half"),
            RopeNdConfig(grid=(2, 3), num_prefix_tokens=2, layout="half_reversed"),
            RopeNdConfig(None, (6,), "mixed", layout="half"),
            RopeNdConfig(None, (4, 4), "mixed", per_head=False, rotary_dim=8, layout="interleaved"),
            RopeNdConfig(grid=(5,), assignment="golden", layout="half"),
            RopeNdConfig(grid=(3, 4), assignment="golden", per_head=False, layout="interleaved"),
            RopeNdConfig(grid=(5,), assignment="alternating", layout="half", num_prefix_tokens=1, origin=1),
            RopeNdConfig(grid=(8,), layout="half", coordinates="normalized", columns_first=True),
        ),
        marks="++--+++++++",
    ),
    "mrope": Row(
        "map",
        coordinates.mrope,
        (
            MRopeConfig(layout="half"),
            MRopeConfig(10_000.0, (3, 2, 1), rotary_dim=12, layout="interleaved"),
            MRopeConfig(500_000.0, interleaved=True, layout="half", spatial_reset=True),
        ),
        everywhere=True,
        marks="+++++++++++",
    ),
}
