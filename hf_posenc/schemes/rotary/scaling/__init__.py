"""Scalings of RoPE for sequences longer than in training.

Each scaling agrees with the transformers function of the same name, if there is one. Notation: `theta` the base, `d`
the rotary width, `m = 0 .. d/2 - 1` the pair, `s` the factor, `L` the original length.
"""

from hf_posenc.schemes.rotary.scaling.base import (
    OuterScaling as OuterScaling,
    RopeScaling as RopeScaling,
    check_scaling as check_scaling,
    rope_exponents as rope_exponents,
    rope_inverse_frequencies as rope_inverse_frequencies,
)
from hf_posenc.schemes.rotary.scaling.by_length import (
    DynamicScaling as DynamicScaling,
    DynamicYarnScaling as DynamicYarnScaling,
    LongRopeScaling as LongRopeScaling,
)
from hf_posenc.schemes.rotary.scaling.clipped import ClippedScaling as ClippedScaling
from hf_posenc.schemes.rotary.scaling.constant import (
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    NtkScaling as NtkScaling,
    YarnScaling as YarnScaling,
)
