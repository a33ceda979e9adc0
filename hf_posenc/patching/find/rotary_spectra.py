"""The frequencies of a stock rotary module, below and above the lengths at which they change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.find.looked_up_phases import cosines_in
from hf_posenc.patching.find.rotary_functions import call_rotary, has_layer_types, inverse_frequencies_of
from hf_posenc.schemes.config import BuildContext, SchemeConfig


@dataclass
class Spectrum:
    """The frequencies of a rotary module for sequences of one length.

    Args:
        length: number of tokens.
        frequencies: `(pairs,)` float32, in radians per position.
        scaling: factor of cosine and sine.
    """

    length: int
    frequencies: Tensor
    scaling: float

    def same_as(self, other: Spectrum) -> bool:
        """Whether both have the same frequencies and scaling."""
        return torch.equal(self.frequencies, other.frequencies) and self.scaling == other.scaling

    @property
    def rounded(self) -> bool:
        """Whether a half-precision dtype can represent all frequencies, as in a model that was cast."""
        own = self.frequencies
        return any(torch.equal(own, own.to(dtype).float()) for dtype in (torch.bfloat16, torch.float16))


def phases_of(module: nn.Module, hidden: Tensor, position_ids: Tensor, layer_type: str | None) -> Tensor | None:
    """The cosines (or complex phases) of a rotary module, `(batch, query_len, width)`.

    Returns `None` if the module has no frequencies for the layer type.
    """
    takes_type = has_layer_types(module)
    if takes_type and not hasattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"):
        return None
    if not takes_type and layer_type is not None:
        return None
    output = call_rotary(module, hidden, position_ids, *((layer_type,) if takes_type else ()))
    phases = cosines_in(output)
    return phases[0] if phases.dim() == 4 else phases


def spectra_of(rotary: nn.Module, layer_type: str | None, parameters: Any, hidden: Tensor) -> list[Spectrum]:
    """The frequencies of a rotary module at several lengths.

    Transformers' modules recompute their frequencies in the forward pass, from their config, their buffers and the
    largest position. A copy of the module is therefore called with single positions.

    Args:
        rotary: the module, which is not changed.
        layer_type: the layer type, if the module has separate frequencies for several.
        parameters: its `rope_parameters`, which may contain a length too.
        hidden: any tensor with the dtype and device of the hidden states.

    Returns:
        One entry for each length. A module that does not store its original frequencies never changes them, and has a
        single entry.
    """
    clone = scratch_copy(rotary)
    found = []
    for length in _lengths(rotary, layer_type, parameters):
        position_ids = torch.tensor([[length - 1]], device=hidden.device)
        phases_of(clone, hidden.new_zeros(1, 1, 1), position_ids, layer_type)
        frequencies = inverse_frequencies_of(clone, layer_type).detach().float().cpu().clone()
        found.append(Spectrum(length, frequencies, float(_of_layer_type(clone, "attention_scaling", layer_type, 1.0))))
    return found


def describes(
    config: SchemeConfig, spectra: list[Spectrum], context: BuildContext, tolerance: float | None = None
) -> bool:
    """Whether a rotary scheme has these frequencies at these lengths.

    Args:
        config: the scheme.
        spectra: the frequencies of a stock module.
        context: the context of a layer that uses the module.
        tolerance: relative tolerance. The default is 1e-6 (float32), and 1e-5 above length 1, where transformers
            computes powers of a length-dependent base in float32.
    """
    try:
        query_key_map: Any = config.build(context).query_key_map
    except (ValueError, PositionEncodingError):
        return False
    for spectrum in spectra:
        own = query_key_map.inverse_frequencies(torch.tensor([[spectrum.length]])).reshape(-1)
        allowed = tolerance or (1e-6 if spectrum.length == 1 else 1e-5)
        if own.shape != spectrum.frequencies.shape:
            return False
        if not torch.allclose(own, spectrum.frequencies, rtol=allowed, atol=0.0):
            return False
        if abs(query_key_map.attention_scaling - spectrum.scaling) >= 1e-6:
            return False
    return True


def _lengths(rotary: nn.Module, layer_type: str | None, parameters: Any) -> list[int]:
    """1, and lengths around each length in the module or its config."""
    if _of_layer_type(rotary, "original_inv_freq", layer_type) is None:
        return [1]
    named = (
        _of_layer_type(rotary, "original_max_seq_len", layer_type),
        getattr(getattr(rotary, "config", None), "max_position_embeddings", None),
        parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None,
    )
    switches = {length for length in named if isinstance(length, int)}
    return sorted({1}.union(*({length, length + 1, 4 * length} for length in switches)))


def _of_layer_type(rotary: nn.Module, name: str, layer_type: str | None, default: Any = None) -> Any:
    value = getattr(rotary, f"{layer_type}_{name}", None) if layer_type else None
    return getattr(rotary, name, default) if value is None else value


def scratch_copy(module: nn.Module) -> nn.Module:
    """A copy of the module with cloned buffers, so that running it does not change the module."""
    clone = copy.copy(module)
    buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    clone.__dict__ = module.__dict__ | {"_buffers": buffers}
    return clone
