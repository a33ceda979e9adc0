"""Measured properties of schemes, each with a threshold. They need no model."""

from hf_posenc.metrics.properties.decay import decay_curve, long_term_decay
from hf_posenc.metrics.properties.encodings import length_consistency, logit_defect, low_precision, uniqueness
from hf_posenc.metrics.properties.linearity import linearity, sinusoidal_shift
from hf_posenc.metrics.properties.logits import (
    defined_past_training,
    determinism,
    extensibility,
    norm_preservation,
    relativity,
)
from hf_posenc.metrics.properties.specimen import Measurement, Specimen, build_specimen, specimen_forms
from hf_posenc.metrics.properties.table import properties_table

__all__ = [
    "Measurement", "Specimen", "build_specimen", "decay_curve", "defined_past_training", "determinism", "extensibility",
    "length_consistency", "linearity", "logit_defect", "long_term_decay", "low_precision", "norm_preservation",
    "properties_table", "relativity", "sinusoidal_shift", "specimen_forms", "uniqueness",
]  # fmt: skip
