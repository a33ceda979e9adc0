"""The scheme of a rotary module that reads positions on three axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.sites import Stack
from hf_posenc.schemes import MRopeConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.rotary.mrope import AXES
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

#: Relative error of a frequency that is computed from the cosine and the sine of its angle in float32.
_TOLERANCE = 1e-5


def multimodal_scheme(by_axis: Tensor, parameters: Any, layout: str, stack: Stack) -> SchemeConfig:
    """The scheme with these frequencies.

    Args:
        by_axis: `(3, pairs)` float32, radians per position on each axis.
        parameters: the `rope_parameters` of the config.
        layout: the pairing.
        stack: the stack, for messages.

    Raises:
        UnsupportedError: if a pair turns with several axes, or the phases have a factor or depend on the length.
    """
    axes = by_axis.abs().argmax(0)
    spectrum = by_axis.gather(0, axes.unsqueeze(0)).squeeze(0)
    known = parameters if isinstance(parameters, dict) else {}
    scaled = known.get("rope_type", "default") not in ("default", "mrope")
    if scaled or not torch.equal((by_axis != 0).sum(0), torch.ones_like(axes)):
        raise UnsupportedError(
            f"{type(stack.module).__name__} rotates pairs with positions on three axes in a way that no scheme of this "
            f"library describes (rope_type {known.get('rope_type')!r}). Any scheme can replace it, and unpatch_model "
            "restores it."
        )
    pairs, theta = len(axes), known.get("rope_theta")
    stated: dict[str, Any] = {"rotary_dim": 2 * pairs, "layout": layout}
    if theta and torch.allclose(spectrum, rope_inverse_frequencies(theta, 2 * pairs), rtol=_TOLERANCE, atol=0.0):
        stated["theta"] = float(theta)
    else:
        stated["inverse_frequencies"] = tuple(spectrum.tolist())
    sections = tuple(int((axes == axis).sum()) for axis in range(len(AXES)))
    for interleaved in (False, True):
        config = MRopeConfig(sections=sections, interleaved=interleaved, **stated)
        try:
            if torch.equal(config.axis_of_pair(pairs), axes):
                return config
        except ValueError:
            continue  # These sections cannot be interleaved.
    return MRopeConfig(axes=tuple(axes.tolist()), **stated)
