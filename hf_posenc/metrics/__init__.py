"""What a position encoding does to a model, measured: pure functions that return data."""

from hf_posenc.metrics.distance import cosine_distance, relative_l2
from hf_posenc.metrics.dog import dog_test
from hf_posenc.metrics.dog_result import DogResult, DogRow, LayerDistance
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.order import OrderSensitivity, order_sensitivity
from hf_posenc.metrics.probe import AttentionProbe, build_for_probe, probe_distance, probe_heads
from hf_posenc.metrics.representations import hidden_states, sentence_embeddings
from hf_posenc.metrics.words import TokenizedPair, tokenize_pair

__all__ = [
    "AttentionProbe",
    "DogResult",
    "DogRow",
    "LayerDistance",
    "MeasurementError",
    "OrderSensitivity",
    "TokenizedPair",
    "build_for_probe",
    "cosine_distance",
    "dog_test",
    "hidden_states",
    "order_sensitivity",
    "probe_distance",
    "probe_heads",
    "relative_l2",
    "sentence_embeddings",
    "tokenize_pair",
]
