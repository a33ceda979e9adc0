"""What order and place of its tokens mean to a model: a suite beyond the one sentence of the dog test."""

from hf_posenc.metrics.sensitivity.material import ENGLISH, Material, TokenizedMaterial, tokenize_material
from hf_posenc.metrics.sensitivity.permuted_context import PermutedContext, permuted_context
from hf_posenc.metrics.sensitivity.repeated_words import RepeatedWords, repeated_words
from hf_posenc.metrics.sensitivity.role_swaps import RoleSwaps, role_swaps
from hf_posenc.metrics.sensitivity.shifted_positions import ShiftedPositions, shifted_positions
from hf_posenc.metrics.sensitivity.suite import sensitivity_test

__all__ = [
    "ENGLISH",
    "Material",
    "PermutedContext",
    "RepeatedWords",
    "RoleSwaps",
    "ShiftedPositions",
    "TokenizedMaterial",
    "permuted_context",
    "repeated_words",
    "role_swaps",
    "sensitivity_test",
    "shifted_positions",
    "tokenize_material",
]
