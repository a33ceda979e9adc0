"""Biases that are functions of distance or position."""

from __future__ import annotations

from hf_posenc.schemes.bias.fire import FireConfig
from hf_posenc.schemes.bias.kerple import KerpleConfig

from ..references import distance_biases
from .row import Row

ROWS: dict[str, Row] = {
    "kerple": Row(
        "bias",
        distance_biases.kerple,
        (
            KerpleConfig(),
            KerpleConfig("power"),
            KerpleConfig("power", exponent=1.5),
            KerpleConfig(minimum=0.5, shared=False),
        ),
        marks="+++.++..+--",
    ),
    "fire": Row(
        "logits",
        distance_biases.fire,
        (
            FireConfig(initial_threshold=8.0),
            FireConfig(width=4, initial_c=2.0, initial_threshold=10.0, epsilon=0.01, shared=True),
        ),
        everywhere=True,
        marks="++-.++..++-",
    ),
}
