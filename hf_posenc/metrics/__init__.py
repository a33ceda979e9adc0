"""What a position encoding does to a model, measured: pure functions that return data."""

from hf_posenc.metrics.distance import cosine_distance, relative_l2
from hf_posenc.metrics.dog import dog_test
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.generalization import SYNTHETIC_TASKS, SyntheticExamples, compare_generalization, exact_match
from hf_posenc.metrics.language_modeling import loss_by_length, sliding_window_loss, text_losses, token_losses
from hf_posenc.metrics.minimal_pairs import minimal_pairs_accuracy, read_minimal_pairs
from hf_posenc.metrics.order import OrderSensitivity, order_sensitivity
from hf_posenc.metrics.probe import AttentionProbe, build_for_probe, probe_distance, probe_heads
from hf_posenc.metrics.properties import (
    Measurement,
    PropertiesRow,
    Specimen,
    build_specimen,
    decay_curve,
    defined_past_training,
    determinism,
    extensibility,
    length_consistency,
    linearity,
    logit_defect,
    long_term_decay,
    low_precision,
    norm_preservation,
    properties_table,
    relativity,
    rotary_envelope,
    sinusoidal_shift,
    specimen_forms,
    uniqueness,
)
from hf_posenc.metrics.quantization import quantization_test, quantized_positions
from hf_posenc.metrics.representations import hidden_states, sentence_embeddings
from hf_posenc.metrics.sensitivity import sensitivity_test
from hf_posenc.metrics.words import TokenizedPair, tokenize_pair

__all__ = [
    "SYNTHETIC_TASKS",
    "AttentionProbe",
    "Measurement",
    "MeasurementError",
    "OrderSensitivity",
    "PropertiesRow",
    "Specimen",
    "SyntheticExamples",
    "TokenizedPair",
    "build_for_probe",
    "build_specimen",
    "compare_generalization",
    "cosine_distance",
    "decay_curve",
    "defined_past_training",
    "determinism",
    "dog_test",
    "exact_match",
    "extensibility",
    "hidden_states",
    "length_consistency",
    "linearity",
    "logit_defect",
    "long_term_decay",
    "loss_by_length",
    "low_precision",
    "minimal_pairs_accuracy",
    "norm_preservation",
    "order_sensitivity",
    "probe_distance",
    "probe_heads",
    "properties_table",
    "quantization_test",
    "quantized_positions",
    "read_minimal_pairs",
    "relative_l2",
    "relativity",
    "rotary_envelope",
    "sensitivity_test",
    "sentence_embeddings",
    "sinusoidal_shift",
    "sliding_window_loss",
    "specimen_forms",
    "text_losses",
    "token_losses",
    "tokenize_pair",
    "uniqueness",
]
