"""BERT in llama.cpp: LayerNorm after attention and after a feed-forward with GELU, biases everywhere."""

from __future__ import annotations

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Carrier, of_types
from hf_posenc.export.gguf.blocks import (
    GELU_NAMES,
    geometric_entries,
    model_length,
    refuse_other_biases,
    rotate_halves,
    sizes,
)
from hf_posenc.export.gguf.file import GgufForm, named_weights
from hf_posenc.export.layers import ModelParts, rotations_of, rows_of
from hf_posenc.schemes.needs import BIASES, Need

BLOCKS = "BERT's"


def table(parts: ModelParts) -> GgufForm:
    """Vectors that are added to the embeddings, as rows of BERT's table; without a scheme, zeros."""
    form, additive = _form(parts, "bert"), parts.additive
    count, width = model_length(parts), int(parts.model.config.hidden_size)
    rows = torch.zeros(count, width) if additive is None else rows_of(additive, count)
    form.tensors["position_embd.weight"] = rows
    return form


def alibi(parts: ModelParts) -> GgufForm:
    """ALiBi with its fixed slopes, the same in both directions."""
    refuse_other_biases(parts)
    return _form(parts, "jina-bert-v2")


def one_rope(parts: ModelParts) -> GgufForm:
    """One spectrum of RoPE in all layers, with any base and factor, in all of a head or some of its dimensions."""
    rotations = rotations_of(parts)
    entries, form = geometric_entries(rotations[0]), _form(parts, "jina-bert-v3")
    rotate_halves(form, rotations, entries)
    for layer in range(len(rotations)):
        for suffix in ("weight", "bias"):
            kinds = [f"blk.{layer}.{kind}.{suffix}" for kind in ("attn_q", "attn_k", "attn_v")]
            joined = torch.cat([form.tensors.pop(kind).float() for kind in kinds])
            form.tensors[f"blk.{layer}.attn_qkv.{suffix}"] = joined
    return form


CARRIERS = (
    Carrier("bert", table, (Need.VECTORS,), of_types("bert")),
    Carrier("jina-bert-v2", alibi, BIASES, of_types("bert")),
    Carrier("jina-bert-v3", one_rope, (Need.MAP,), of_types("bert")),
)


def _form(parts: ModelParts, architecture: str) -> GgufForm:
    """The weights and hyperparameters of a BERT without a head, and without a position encoding.

    llama.cpp adds the first row of the table of token types to every token.
    """
    model, config = parts.model, parts.model.config
    _refuse_other_blocks(parts)
    # The architectures differ in how they use positions; the names are those of 'bert'.
    tensors = named_weights(model, "bert", len(parts.layers), without=("pooler",))
    tensors.pop("position_embd.weight", None)
    return GgufForm(
        architecture,
        sizes(parts, tensors, model_length(parts))
        | {"attention.layer_norm_epsilon": float(config.layer_norm_eps), "attention.causal": False},
        tensors,
        {"ggml.token_type_count": int(tensors["token_types.weight"].shape[0])},
        carrier=f"the architecture {architecture!r}",
    )


def _refuse_other_blocks(parts: ModelParts) -> None:
    name, config = parts.name, parts.model.config
    if parts.model.base_model is not parts.model:
        raise UnsupportedError(
            f"llama.cpp's BERT ends with the hidden states, so it cannot contain the head of {name}. Load the "
            "checkpoint with AutoModel to export its encoder"
        )
    if parts.stack.causal or getattr(config, "is_decoder", False):
        raise UnsupportedError(f"{name} is a decoder here, and llama.cpp's BERT is an encoder")
    if config.hidden_act not in GELU_NAMES:
        raise UnsupportedError(f"{name} has the activation {config.hidden_act!r}; llama.cpp's BERT has 'gelu'")
