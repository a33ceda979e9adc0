"""Grammar in minimal pairs: is the right text likelier than the wrong one?"""

from hf_posenc.metrics.minimal_pairs.accuracy import minimal_pairs_accuracy
from hf_posenc.metrics.minimal_pairs.pairs import MinimalPair, MinimalPairsTask, read_minimal_pairs

__all__ = [
    "MinimalPair",
    "MinimalPairsTask",
    "minimal_pairs_accuracy",
    "read_minimal_pairs",
]
