"""Scalings of RoPE as metadata of llama.cpp."""

from __future__ import annotations

import math

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import LinearScaling, RopeConfig, SchemeConfig, YarnScaling


def scaling_entries(scheme: SchemeConfig, attention_factor: float) -> dict[str, int | float | str | bool]:
    """Linear scaling and YaRN with the options that llama.cpp reads. Cosine and sine are then scaled by llama.cpp.

    Args:
        scheme: the scheme.
        attention_factor: what it multiplies cosine and sine by.

    Returns:
        The entries "rope.scaling.*".

    Raises:
        UnsupportedError: for another scheme.
    """
    scaling = scheme.scaling if isinstance(scheme, RopeConfig) else None
    if isinstance(scaling, LinearScaling):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if not isinstance(scaling, YarnScaling):
        raise UnsupportedError("the scheme is not RoPE with linear scaling or YaRN")
    if not scaling.truncate:
        raise UnsupportedError("llama.cpp rounds the ends of YaRN's ramp, and truncate=False does not")
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_max_positions,
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        # llama.cpp multiplies the factor of the formula by this one.
        "rope.scaling.attn_factor": attention_factor / (0.1 * math.log(scaling.factor) + 1.0),
    }
