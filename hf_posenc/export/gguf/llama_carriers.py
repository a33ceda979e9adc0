"""Schemes in Llama-like blocks of llama.cpp."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.alibi import refuse_other_biases
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.llama_blocks import llama_form, reorder_heads, widen_heads
from hf_posenc.export.gguf.parts import EQUAL, ModelParts, refuse_other_parts, rotations_of
from hf_posenc.export.gguf.rope_scaling import scaling_entries
from hf_posenc.schemes import SchemeConfig
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

#: Divides the frequency of a pair that does not turn.
_STOPPED = 1e30
#: llama.cpp's smollm3 does not rotate in every fourth layer.
_SMOLLM3_STEP = 4


def shared_spectrum(parts: ModelParts) -> GgufForm:
    """One spectrum in all layers, as a factor of each pair of RoPE's spectrum."""
    rotations = rotations_of(parts)
    form = llama_form(parts, "llama", "the architecture 'llama'")
    reorder_heads(form, rotations)
    return _with_spectrum(form, rotations[0].frequencies, _theta(parts.scheme))


def scaling_metadata(parts: ModelParts) -> GgufForm:
    """Linear scaling and YaRN with the options that llama.cpp reads."""
    scheme, rotations = parts.scheme, rotations_of(parts, same=False)
    entries = scaling_entries(scheme, float(rotations[0].factors[0]))
    if len({rotation.spectrum() for rotation in rotations}) > 1 or not bool(rotations[0].frequencies.all()):
        raise UnsupportedError("RoPE does not rotate the whole head in every layer")
    form = llama_form(
        parts, "llama", f"the architecture 'llama' with rope.scaling.type {entries['rope.scaling.type']!r}"
    )
    # The metadata has the factor of cosine and sine.
    reorder_heads(form, [replace(rotation, factors=torch.ones_like(rotation.factors)) for rotation in rotations])
    head_dim = form.metadata["attention.key_length"]
    form.metadata.update({"rope.dimension_count": head_dim, "rope.freq_base": _theta(scheme), **entries})
    return form


def every_fourth_layer_stopped(parts: ModelParts) -> GgufForm:
    """The layers of SmolLM3: RoPE, and no positions in every fourth layer."""
    rotations = rotations_of(parts, same=False)
    theta = _theta(parts.scheme)
    head_dim = parts.layers[0].head_dim
    rope = rope_inverse_frequencies(theta, head_dim).double()
    for layer, rotation in enumerate(rotations):
        expected = torch.zeros_like(rope) if (layer + 1) % _SMOLLM3_STEP == 0 else rope
        found = rotation.frequencies
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=EQUAL, atol=0):
            raise UnsupportedError(
                f"it rotates by RoPE's frequencies in all but every fourth layer; layer {layer} differs"
            )
    form = llama_form(parts, "smollm3", "the architecture 'smollm3', which does not rotate in every fourth layer")
    reorder_heads(form, rotations)
    form.metadata.update({"rope.dimension_count": head_dim, "rope.freq_base": theta})
    return form


def spectrum_per_layer(parts: ModelParts) -> GgufForm:
    """A spectrum in each layer, in wide heads: each layer uses its own part of the pairs."""
    rotations = rotations_of(parts, same=False)
    spectra = list(dict.fromkeys(rotation.spectrum() for rotation in rotations))
    if len(spectra) > 4:
        raise UnsupportedError(
            f"the layers have {len(spectra)} different spectra, and heads {len(spectra)} times as wide are too slow"
        )
    head_dim = parts.layers[0].head_dim
    carrier = f"the architecture 'llama' with heads {len(spectra)} times as wide, a part for each spectrum"
    form = llama_form(parts, "llama", carrier)
    reorder_heads(form, rotations)
    starts = [spectra.index(rotation.spectrum()) * head_dim for rotation in rotations]
    widen_heads(form, starts, len(spectra) * head_dim)
    return _with_spectrum(form, torch.tensor(spectra, dtype=torch.float64).flatten(), _theta(parts.scheme))


def alibi(parts: ModelParts) -> GgufForm:
    """ALiBi with its fixed slopes, which llama.cpp computes from the number of heads."""
    refuse_other_parts(parts, "logit_bias")
    refuse_other_biases(parts)
    form = llama_form(parts, "refact", "the architecture 'refact', which has ALiBi and no rotation")
    biases = [name for name in form.tensors if name.endswith(".bias") and not _is_projection_bias(name)]
    if biases:
        raise UnsupportedError(f"the architecture 'refact' of llama.cpp has no bias like {biases[0]}")
    return form


def _is_projection_bias(name: str) -> bool:
    return name.split(".")[-2] in ("attn_q", "attn_k", "attn_v")


def _with_spectrum(form: GgufForm, frequencies: Tensor, theta: float) -> GgufForm:
    """Adds a spectrum to a form. RoPE's own needs no factors."""
    width = form.metadata["attention.key_length"]
    assert isinstance(width, int)
    form.metadata.update({"rope.dimension_count": width, "rope.freq_base": theta})
    rope = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if torch.allclose(frequencies, rope, rtol=EQUAL, atol=0):
        return form
    factors = torch.where(frequencies == 0, _STOPPED, rope / frequencies)
    tensors = {**form.tensors, "rope_freqs.weight": factors.float()}
    return GgufForm(form.architecture, form.metadata, tensors, f"{form.carrier} and rope_freqs.weight")


def _theta(scheme: SchemeConfig) -> float:
    """The base of the scheme or of a scheme inside it. Only its product with the factors matters."""
    own = getattr(scheme, "theta", None)
    if own is not None:
        return float(own)
    return next((theta for theta in map(_theta, scheme.children().values()) if theta != 10000.0), 10000.0)
