"""What it costs to hold positions, encodings or positional keys in low precision: in a model, by its loss."""

from hf_posenc.metrics.quantization.measure import POSITIONS, VARIANTS, quantized_positions
from hf_posenc.metrics.quantization.of_text import quantization_test
from hf_posenc.metrics.quantization.result import QuantizedLosses, VariantRow
from hf_posenc.metrics.quantization.rounding import rounded, rounded_ids
from hf_posenc.metrics.quantization.scheme import QuantizedConfig

__all__ = [
    "POSITIONS",
    "VARIANTS",
    "QuantizedConfig",
    "QuantizedLosses",
    "VariantRow",
    "quantization_test",
    "quantized_positions",
    "rounded",
    "rounded_ids",
]
