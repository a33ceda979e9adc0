"""Measurements of what a position encoding does to a model. All are pure functions that return data."""

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.dog import TokenizedPair, dog_test, tokenize_pair
from hf_posenc.metrics.generalization import SYNTHETIC_TASKS, SyntheticExamples, compare_generalization
from hf_posenc.metrics.images.resolution import resolution_test
from hf_posenc.metrics.images.sensitivity import image_sensitivity_test, picture_dog_test
from hf_posenc.metrics.language_modeling import loss_by_length, text_losses, token_losses
from hf_posenc.metrics.minimal_pairs import minimal_pairs_accuracy, read_minimal_pairs
from hf_posenc.metrics.probe import AttentionProbe, probe_distance
from hf_posenc.metrics.properties import Measurement, Specimen, build_specimen, properties_table
from hf_posenc.metrics.quantization import quantization_test, quantized_positions
from hf_posenc.metrics.sensitivity import OrderSensitivity, order_sensitivity, sensitivity_test
from hf_posenc.metrics.statistics import cosine_distance, relative_l2

__all__ = [
    "SYNTHETIC_TASKS", "AttentionProbe", "Measurement", "MeasurementError", "OrderSensitivity", "Specimen",
    "SyntheticExamples", "TokenizedPair", "build_specimen", "compare_generalization",
    "cosine_distance", "dog_test", "image_sensitivity_test", "loss_by_length",
    "minimal_pairs_accuracy", "order_sensitivity", "picture_dog_test", "probe_distance", "properties_table",
    "quantization_test", "quantized_positions", "read_minimal_pairs", "relative_l2", "resolution_test",
    "sensitivity_test", "text_losses", "token_losses", "tokenize_pair",
]  # fmt: skip
