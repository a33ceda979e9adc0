"""Temperatures that depend on position."""

from __future__ import annotations

from hf_posenc.schemes.scale.llama4_scale import Llama4ScaleConfig
from hf_posenc.schemes.scale.log_n_scale import LogNScaleConfig
from hf_posenc.schemes.scale.ssmax import SSMaxConfig

from ..references import scales
from .row import Row

ROWS: dict[str, Row] = {
    "ssmax": Row(
        "logits",
        scales.ssmax,
        (SSMaxConfig(), SSMaxConfig(bias=True), SSMaxConfig(initial_scale=0.43), SSMaxConfig(training_length=16)),
        of_start=True,
        marks="--+.++..-++",
        # The factor of the query at i follows log(i + 1): a number of its own, which half precision rounds together.
        causal_marks="++-.++..---",
    ),
    "log_n_scale": Row(
        "logits",
        scales.log_n,
        (LogNScaleConfig(4), LogNScaleConfig(20, clamp=False), LogNScaleConfig(clamp=False)),
        marks="--+.++..-++",
        # Clamped: 1 for every position up to the training length.
        causal_marks="-+-.++..---",
    ),
    "llama4_scale": Row(
        "logits",
        scales.llama4,
        (Llama4ScaleConfig(floor_scale=4), Llama4ScaleConfig(0.5, 7, offset=0)),
        everywhere=True,
        marks="--+.++..-++",
        # One factor for each 8192 positions: few numbers, and none that rounding joins.
        causal_marks="-+-.++..-++",
    ),
}
