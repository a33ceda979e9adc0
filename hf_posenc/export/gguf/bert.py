"""BERT in llama.cpp: LayerNorm after attention and after a feed-forward with GELU, biases everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.gelu import GELU_NAMES
from hf_posenc.export.gguf.names import named_weights
from hf_posenc.export.gguf.parts import (
    ModelParts,
    Rotation,
    geometric_entries,
    model_length,
    refuse_other_biases,
    refuse_other_parts,
    rotations_of,
)
from hf_posenc.export.layers import rows_of


def table(parts: ModelParts) -> GgufForm:
    """Vectors that are added to the embeddings, as rows of BERT's table; without a scheme, zeros."""
    refuse_other_parts(parts, "additive")
    form, additive = _form(parts, "bert"), parts.encoding.additive
    count, width = model_length(parts), int(parts.model.config.hidden_size)
    rows = torch.zeros(count, width) if additive is None else rows_of(additive, count)
    form.tensors["position_embd.weight"] = rows
    return form


def alibi(parts: ModelParts) -> GgufForm:
    """ALiBi with its fixed slopes, the same in both directions."""
    refuse_other_parts(parts, "logit_bias")
    refuse_other_biases(parts)
    return _form(parts, "jina-bert-v2")


def one_rope(parts: ModelParts) -> GgufForm:
    """One spectrum of RoPE in all layers, with any base and factor, in all of a head or its first dimensions."""
    rotations = rotations_of(parts)
    frequencies = rotations[0].frequencies
    pairs = int(frequencies.count_nonzero())
    turning = frequencies[:pairs]
    if not pairs or not turning.all():
        raise UnsupportedError("RoPE rotates the first dimensions of every head")
    entries = geometric_entries(turning)
    if entries is None:
        raise UnsupportedError("the frequencies are not those of RoPE, and these blocks have no table of frequencies")
    form = _form(parts, "jina-bert-v3")
    _join_projections(form, rotations)
    form.metadata.update({"rope.dimension_count": 2 * pairs, **entries})
    return form


def _form(parts: ModelParts, architecture: str) -> GgufForm:
    """The weights and hyperparameters of a BERT without a head, and without a position encoding.

    llama.cpp adds the first row of the table of token types to every token.
    """
    model, attention = parts.model, parts.layers[0]
    config: Any = model.config
    _refuse_other_blocks(parts)
    # The architectures differ in what they do with positions; the names are those of 'bert'.
    tensors = named_weights(model, "bert", len(parts.layers), without=("pooler",))
    tensors.pop("position_embd.weight", None)
    return GgufForm(
        architecture,
        {
            "block_count": len(parts.layers),
            "context_length": model_length(parts),
            "embedding_length": int(config.hidden_size),
            "feed_forward_length": int(config.intermediate_size),
            "attention.head_count": attention.num_heads,
            "attention.layer_norm_epsilon": float(config.layer_norm_eps),
            "attention.causal": False,
            "vocab_size": int(config.vocab_size),
        },
        tensors,
        f"the architecture {architecture!r}",
        {"ggml.token_type_count": int(tensors["token_types.weight"].shape[0])},
    )


def _join_projections(form: GgufForm, rotations: list[Rotation]) -> None:
    """Joins the projections of queries, keys and values, with the pairs of a head in the halves of its rotated part."""
    heads = form.metadata["attention.head_count"]
    assert isinstance(heads, int)
    for layer, rotation in enumerate(rotations):
        pairs = int(rotation.frequencies.count_nonzero())
        width = len(rotation.order)
        order = [*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2), *range(2 * pairs, width)]
        for suffix in ("weight", "bias"):
            joined: list[Tensor] = []
            for kind in ("attn_q", "attn_k", "attn_v"):
                rows = form.tensors.pop(f"blk.{layer}.{kind}.{suffix}").float()
                if kind != "attn_v":
                    by_head = rotation.folded(rows.reshape(heads, width, -1))[:, order]
                    rows = by_head.reshape(rows.shape)
                joined.append(rows)
            form.tensors[f"blk.{layer}.attn_qkv.{suffix}"] = torch.cat(joined)


def _refuse_other_blocks(parts: ModelParts) -> None:
    name, config = type(parts.model).__name__, parts.model.config
    if parts.model.base_model is not parts.model:
        raise UnsupportedError(
            f"llama.cpp's BERT ends with the hidden states, so there is no place for the head of {name}. Load the "
            "checkpoint with AutoModel to export its encoder"
        )
    if parts.stack.causal or getattr(config, "is_decoder", False):
        raise UnsupportedError(f"{name} is a decoder here, and llama.cpp's BERT is an encoder")
    if config.hidden_act not in GELU_NAMES:
        raise UnsupportedError(f"{name} has the activation {config.hidden_act!r}; llama.cpp's BERT has 'gelu'")
