"""Llama-like models: RMSNorm before attention and before a gated feed-forward, grouped heads, optional biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.names import named_weights
from hf_posenc.export.gguf.parts import ModelParts, Rotation, refuse_without_logits
from hf_posenc.export.layers import QUERY_FACTOR

_REQUIRED = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def is_llama(model: PreTrainedModel) -> bool:
    """Whether a model may have these blocks: its norms are RMSNorm. `llama_form` looks at its weights."""
    return getattr(model.config.get_text_config(), "rms_norm_eps", None) is not None


def llama_form(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    """Returns the weights and hyperparameters of Llama-like blocks, without a position encoding.

    Args:
        parts: the model.
        architecture: an architecture of llama.cpp with these blocks.
        carrier: what will carry the scheme.

    Raises:
        UnsupportedError: for a model with other blocks.
    """
    config, attention = parts.stack.config, parts.stack.attentions[0]
    name = type(parts.model).__name__
    refuse_without_logits(parts)
    _refuse_other_blocks(parts, name)
    tensors = named_weights(parts.model, architecture, len(parts.layers))
    required = [f"blk.{layer}.{kind}.weight" for layer in range(len(parts.layers)) for kind in _REQUIRED]
    missing = [key for key in ("token_embd.weight", "output_norm.weight", *required) if key not in tensors]
    if missing:
        raise UnsupportedError(f"{name} does not have Llama's blocks: it lacks {missing[0]}")
    factor = getattr(attention.module, "scaling", attention.head_dim**-0.5) * attention.head_dim**0.5
    if abs(factor - 1) > 1e-6:
        _scale_queries(tensors, factor)
    return GgufForm(
        architecture,
        {
            "block_count": len(parts.layers),
            "context_length": int(config.max_position_embeddings),
            "embedding_length": int(config.hidden_size),
            "feed_forward_length": int(config.intermediate_size),
            "attention.head_count": attention.num_heads,
            "attention.head_count_kv": attention.num_key_value_heads,
            "attention.key_length": attention.head_dim,
            "attention.value_length": attention.head_dim,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "vocab_size": int(config.vocab_size),
        },
        tensors,
        carrier,
    )


def reorder_heads(form: GgufForm, rotations: Sequence[Rotation]) -> None:
    """Puts the pairs of every query and key head next to each other, as llama.cpp rotates them."""
    for layer, rotation in enumerate(rotations):
        for kind in ("attn_q", "attn_k"):
            for name, rows in _head_rows(form, layer, kind).items():
                form.tensors[name] = _from_heads(rotation.folded(rows), form.tensors[name])


def widen_heads(form: GgufForm, starts: Sequence[int], width: int) -> None:
    """Places every query and key head in a wider head of zeros, so that each layer uses pairs of its own.

    Args:
        form: the model; its hyperparameters are changed too.
        starts: the first dimension that a layer uses.
        width: the new width of a head.
    """
    old = form.metadata["attention.key_length"]
    assert isinstance(old, int)
    for layer, start in enumerate(starts):
        for kind, place in (("attn_q", start), ("attn_k", start), ("attn_v", 0)):
            # llama.cpp divides logits by the root of the width.
            factor = (width / old) ** 0.5 if kind == "attn_q" else 1.0
            for name, rows in _head_rows(form, layer, kind).items():
                wide = rows.new_zeros(rows.shape[0], width, rows.shape[2])
                wide[:, place : place + old] = rows * factor
                form.tensors[name] = _from_heads(wide, form.tensors[name])
        name = f"blk.{layer}.attn_output.weight"
        columns = form.tensors[name]
        heads = columns.unflatten(1, (-1, old))
        form.tensors[name] = torch.nn.functional.pad(heads, (0, width - old)).flatten(1)
    form.metadata["attention.key_length"] = form.metadata["attention.value_length"] = width


def _head_rows(form: GgufForm, layer: int, kind: str) -> dict[str, Tensor]:
    """Weights and biases of a projection as `(heads, head_dim, in)` in float32; `in` is 1 for a bias."""
    width = form.metadata["attention.key_length"]
    assert isinstance(width, int)
    found = {}
    for suffix in ("weight", "bias"):
        name = f"blk.{layer}.{kind}.{suffix}"
        if name in form.tensors:
            found[name] = form.tensors[name].float().reshape(-1, width, form.tensors[name][0].numel())
    return found


def _from_heads(rows: Tensor, like: Tensor) -> Tensor:
    flat = rows.flatten(0, 1)
    return flat if like.ndim == 2 else flat.squeeze(-1)


def _scale_queries(tensors: dict[str, Tensor], factor: float) -> None:
    for name in tensors:
        if ".attn_q." in name:
            tensors[name] = tensors[name].float() * factor


def _refuse_other_blocks(parts: ModelParts, name: str) -> None:
    config = parts.stack.config
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
    if (getattr(config, "rope_parameters", None) or {}).get(QUERY_FACTOR):
        # Not left to the comparison: the factor is 1 up to the original length, which no prompt may reach.
        raise UnsupportedError(
            f"{name} multiplies queries by a factor that grows with the position ({QUERY_FACTOR}), which these blocks "
            "of llama.cpp do not have"
        )
    sizes = {(one.num_heads, one.num_key_value_heads, one.head_dim) for one in parts.stack.attentions}
    if len(sizes) > 1:
        raise UnsupportedError(f"the layers of {name} have heads of different numbers or widths")
