"""Scalings of RoPE for sequences longer than in training.

Each scaling agrees with the transformers function of the same name, if there is one. Notation: `theta` the base, `d`
the rotary width, `m = 0 .. d/2 - 1` the pair, `s` the factor, `L` the original length.
"""

from hf_posenc.schemes.rotary.scaling.base import (
    RopeScaling,
    check_scaling,
    rope_exponents,
    rope_inverse_frequencies,
)
from hf_posenc.schemes.rotary.scaling.by_length import DynamicScaling, LongRopeScaling
from hf_posenc.schemes.rotary.scaling.constant import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NtkScaling",
    "RopeScaling",
    "YarnScaling",
    "check_scaling",
    "rope_exponents",
    "rope_inverse_frequencies",
]
