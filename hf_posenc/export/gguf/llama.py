"""Llama-like models in llama.cpp: RMSNorm before attention and before a gated feed-forward, grouped heads, optional
biases, optional experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Carrier, of_types
from hf_posenc.export.gguf.blocks import (
    EQUAL,
    fold_rotations,
    logit_factors,
    refuse_other_biases,
    refuse_without_logits,
    rotate_halves,
    scale_queries,
    sizes,
    stated_rotation,
)
from hf_posenc.export.gguf.experts import EXPERTS, expert_entries, refuse_dense_layers
from hf_posenc.export.gguf.file import GgufForm, Metadata, named_weights
from hf_posenc.export.layers import QUERY_FACTOR, STOPPED, ModelParts, Rotation, rotations_of
from hf_posenc.schemes.needs import BIASES, Need
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

BLOCKS = "Llama's (RMSNorm, gated feed-forward)"
#: llama.cpp's smollm3 does not rotate in every fourth layer.
_SMOLLM3_STEP = 4
_REQUIRED = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class _Own:
    """An architecture of llama.cpp for one type of models. It rotates all of a head, and reads no `rope_freqs.weight`.

    Args:
        name: its name in llama.cpp.
        sum_to_one: whether it divides the weights of the experts of a token by their sum.
        tied: whether its output may be the embeddings.
    """

    name: str
    sum_to_one: bool = True
    tied: bool = True


#: The architectures by the type of the model.
_OWN = {
    "qwen3": _Own("qwen3"),
    "qwen3_moe": _Own("qwen3moe"),
    "qwen2_moe": _Own("qwen2moe", sum_to_one=False, tied=False),
    "olmoe": _Own("olmoe", sum_to_one=False, tied=False),
}


def is_llama(model: PreTrainedModel) -> bool:
    """Whether a model may have these blocks: its norms are RMSNorm, and llama.cpp has no architecture for it alone.
    `_form` looks at its weights.
    """
    if of_types(*_OWN)(model):
        return False
    return getattr(model.config.get_text_config(), "rms_norm_eps", None) is not None


def shared_spectrum(parts: ModelParts) -> GgufForm:
    """One spectrum in all layers, as a factor of each pair of RoPE's spectrum."""
    rotations = rotations_of(parts)
    form = _rotating(parts, rotations, "llama", "the architecture 'llama'")
    return _with_spectrum(form, rotations[0].all_frequencies, parts.theta())


def _with_scaling(parts: ModelParts, rotations: list[Rotation], entries: Metadata, what: str) -> GgufForm:
    if not bool(rotations[0].all_frequencies.all()):
        raise UnsupportedError("RoPE does not rotate the whole head")
    form = _rotating(parts, rotations, "llama", f"the architecture 'llama'{what}")
    form.metadata.update({"rope.dimension_count": form.metadata["attention.key_length"], **entries})
    return form


def every_fourth_layer_stopped(parts: ModelParts) -> GgufForm:
    """The layers of SmolLM3: RoPE, and no positions in every fourth layer."""
    rotations, theta = rotations_of(parts, same=False), parts.theta()
    head_dim = rotations[0].head_dim
    rope = rope_inverse_frequencies(theta, head_dim).double()
    for layer, rotation in enumerate(rotations):
        expected = torch.zeros_like(rope) if (layer + 1) % _SMOLLM3_STEP == 0 else rope
        frequencies = rotation.all_frequencies
        if frequencies.shape != expected.shape or not torch.allclose(frequencies, expected, rtol=EQUAL, atol=0):
            raise UnsupportedError(
                f"it rotates by RoPE's frequencies in all but every fourth layer; layer {layer} differs"
            )
    form = _rotating(
        parts, rotations, "smollm3", "the architecture 'smollm3', which does not rotate in every fourth layer"
    )
    form.metadata.update({"rope.dimension_count": head_dim, "rope.freq_base": theta})
    return form


def spectrum_per_layer(parts: ModelParts) -> GgufForm:
    """A spectrum in each layer, in wide heads: each layer uses its own part of the pairs."""
    rotations = rotations_of(parts, same=False)
    spectra = list(dict.fromkeys(rotation.spectrum for rotation in rotations))
    if len(spectra) > 4:
        raise UnsupportedError(
            f"the layers have {len(spectra)} different spectra, and heads {len(spectra)} times as wide are too slow"
        )
    head_dim = rotations[0].head_dim
    carrier = f"the architecture 'llama' with heads {len(spectra)} times as wide, a part for each spectrum"
    form = _rotating(parts, rotations, "llama", carrier)
    starts = [spectra.index(rotation.spectrum) * head_dim for rotation in rotations]
    _widen_heads(form, starts, head_dim, len(spectra) * head_dim)
    return _with_spectrum(form, torch.tensor(spectra, dtype=torch.float64).flatten(), parts.theta())


def alibi(parts: ModelParts) -> GgufForm:
    """ALiBi with its fixed slopes, which llama.cpp computes from the number of heads."""
    refuse_other_biases(parts)
    form = _form(parts, "refact", "the architecture 'refact', which has ALiBi and no rotation")
    projections = ("attn_q", "attn_k", "attn_v")
    biases = [name for name in form.tensors if name.endswith(".bias") and name.split(".")[-2] not in projections]
    if biases:
        raise UnsupportedError(f"the architecture 'refact' of llama.cpp has no bias like {biases[0]}")
    return form


def _in_own(parts: ModelParts, rotations: list[Rotation], entries: Metadata, what: str) -> GgufForm:
    family = _OWN[parts.model.config.model_type]
    name = family.name
    frequencies = rotations[0].all_frequencies
    if frequencies.any() and not frequencies.all():
        raise UnsupportedError(f"llama.cpp's {name!r} rotates all pairs of a head, and the scheme only some")
    form = _form(parts, name, f"the architecture {name!r}{what}")
    if not family.tied:
        form.tensors.setdefault("output.weight", form.tensors["token_embd.weight"])
    rotate_halves(form, rotations, entries)
    return form


CARRIERS = (
    *(
        Carrier(
            f"{family.name}{what}", partial(stated_rotation, _in_own, scaled=bool(what)), (Need.MAP,), of_types(kind)
        )
        for kind, family in _OWN.items()
        for what in (" with rope.scaling", "")
    ),
    Carrier("llama with rope.scaling", partial(stated_rotation, _with_scaling, scaled=True), (Need.MAP,), is_llama),
    Carrier("llama", shared_spectrum, (Need.MAP,), is_llama),
    Carrier("smollm3", every_fourth_layer_stopped, (Need.MAP,), is_llama),
    Carrier("llama with wide heads", spectrum_per_layer, (Need.MAP,), is_llama),
    Carrier("refact", alibi, BIASES, is_llama),
)


def _with_spectrum(form: GgufForm, frequencies: Tensor, theta: float) -> GgufForm:
    """Adds a spectrum to a form. RoPE's own spectrum needs no factors."""
    width = 2 * len(frequencies)
    form.metadata.update({"rope.dimension_count": width, "rope.freq_base": theta})
    rope = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if torch.allclose(frequencies, rope, rtol=EQUAL, atol=0):
        return form
    form.tensors["rope_freqs.weight"] = torch.where(frequencies == 0, STOPPED, rope / frequencies).float()
    return replace(form, carrier=f"{form.carrier} and rope_freqs.weight")


def _form(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    """The weights and hyperparameters of Llama-like blocks, without a position encoding."""
    config, attention = parts.stack.config, parts.stack.attentions[0]
    refuse_without_logits(parts)
    _refuse_other_blocks(parts)
    refuse_dense_layers(parts, architecture)
    tensors = named_weights(parts.model, architecture, len(parts.layers))
    family = _OWN.get(parts.model.config.model_type, _Own(architecture))
    experts = expert_entries(parts, architecture, tensors, sum_to_one=family.sum_to_one)
    kinds = (*_REQUIRED, *(EXPERTS if experts else _FEED_FORWARD))
    missing = [name for name in (f"blk.0.{kind}.weight" for kind in kinds) if name not in tensors]
    if missing:
        raise UnsupportedError(f"{parts.name} does not have Llama's blocks: it lacks {missing[0]}")
    for index, factor in logit_factors(parts).items():
        scale_queries(tensors, index, attention.num_heads * attention.head_dim, factor)
    return GgufForm(
        architecture,
        sizes(parts, tensors, int(config.max_position_embeddings))
        | {
            "attention.head_count_kv": attention.num_key_value_heads,
            "attention.key_length": attention.head_dim,
            "attention.value_length": attention.head_dim,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            **experts,
        },
        tensors,
        carrier=carrier,
    )


def _rotating(parts: ModelParts, rotations: list[Rotation], architecture: str, carrier: str) -> GgufForm:
    """Llama-like blocks with the pairs of every query and key head next to each other, as llama.cpp rotates them."""
    form = _form(parts, architecture, carrier)
    fold_rotations(form, rotations, Rotation.neighbours)
    return form


def _widen_heads(form: GgufForm, starts: Sequence[int], old: int, width: int) -> None:
    """Places every query and key head in a wider head of zeros, from the first dimension that its layer uses."""
    for layer, start in enumerate(starts):
        # llama.cpp divides logits by the root of the width.
        scale_queries(form.tensors, layer, len(form.tensors[f"blk.{layer}.attn_q.weight"]), (width / old) ** 0.5)
        for kind, place in (("attn_q", start), ("attn_k", start), ("attn_v", 0)):
            for name in (f"blk.{layer}.{kind}.weight", f"blk.{layer}.{kind}.bias"):
                if name in form.tensors:
                    rows = form.tensors[name].float()
                    heads = rows.reshape(-1, old, rows[0].numel())
                    wide = functional.pad(heads, (0, 0, place, width - old - place))
                    form.tensors[name] = wide.reshape(-1, *rows.shape[1:])
        name = f"blk.{layer}.attn_output.weight"
        form.tensors[name] = functional.pad(form.tensors[name].unflatten(1, (-1, old)), (0, width - old)).flatten(1)
    form.metadata["attention.key_length"] = form.metadata["attention.value_length"] = width


def _refuse_other_blocks(parts: ModelParts) -> None:
    config, name = parts.stack.config, parts.name
    needed = ("hidden_size", "intermediate_size", "rms_norm_eps", "vocab_size", "max_position_embeddings")
    absent = [field for field in needed if getattr(config, field, None) is None]
    if absent:
        raise UnsupportedError(f"{name} does not have Llama's blocks: its config has no {absent[0]}")
    activation = getattr(config, "hidden_act", None)
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"{name} has the activation {activation!r}; these blocks of llama.cpp have 'silu'")
    window = getattr(config, "sliding_window", None)
    types = {attention.layer_type for attention in parts.stack.attentions}
    if isinstance(window, int) and window < config.max_position_embeddings and types != {"full_attention"}:
        raise UnsupportedError(
            f"{name} has a sliding window of {window} tokens, which these blocks of llama.cpp do not have"
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedError(f"{name} clips queries, keys and values, which these blocks of llama.cpp do not")
    if (getattr(config, "rope_parameters", None) or {}).get(QUERY_FACTOR):
        # Not left to the comparison: the factor is 1 up to the original length, which no prompt may reach.
        raise UnsupportedError(
            f"{name} multiplies queries by a factor that grows with the position ({QUERY_FACTOR}), which these blocks "
            "of llama.cpp do not have"
        )
    sizes = {(layer.num_heads, layer.num_key_value_heads, layer.head_dim) for layer in parts.stack.attentions}
    if len(sizes) > 1:
        raise UnsupportedError(f"the layers of {name} have heads of different numbers or widths")
