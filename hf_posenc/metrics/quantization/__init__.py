"""What it costs to hold positions, encodings or positional keys in low precision: in a model, by its loss."""

from hf_posenc.metrics.quantization.measure import POSITIONS, VARIANTS, quantization_test, quantized_positions
from hf_posenc.metrics.quantization.scheme import QuantizedConfig, rounded, rounded_ids

__all__ = [
    "POSITIONS", "VARIANTS", "QuantizedConfig", "quantization_test", "quantized_positions", "rounded", "rounded_ids",
]  # fmt: skip
