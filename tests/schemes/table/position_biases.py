"""Biases that read absolute positions."""

from __future__ import annotations

from hf_posenc.schemes.bias.tupe import TupeConfig

from ..references import position_biases
from .row import Row

ROWS: dict[str, Row] = {
    "tupe": Row(
        "logits",
        position_biases.tupe,
        (TupeConfig(reset_first=False), TupeConfig(reset_first=True), TupeConfig(num_positions=60, reset_first=False)),
        marks="++-.-+..---",
        causal_marks="++-.-+..--+",
        reach=(64, 64, 60),
    ),
}
