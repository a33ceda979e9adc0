"""GPT-like models in llama.cpp: LayerNorm before attention and before a feed-forward with GELU, one projection for all
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Carrier, of_types
from hf_posenc.export.gguf.blocks import (
    logit_factors,
    model_length,
    refuse_other_activations,
    refuse_other_biases,
    refuse_without_logits,
    rotate_halves,
    scale_queries,
    sizes,
    stated_rotation,
)
from hf_posenc.export.gguf.file import GgufForm, Metadata, named_weights
from hf_posenc.export.layers import ModelParts, Rotation, rows_of
from hf_posenc.schemes.needs import BIASES, Need

BLOCKS = "GPT-2's (LayerNorm, feed-forward with GELU, one projection of queries, keys and values)"
#: The slope of the last of 2^n heads is 2^-8 (arXiv:2108.12409).
_ALIBI = 8.0


@dataclass(frozen=True)
class _Source:
    """How a class of transformers stores these blocks.

    Args:
        architecture: the architecture of llama.cpp with its names of weights.
        activation: the module of a layer that computes the activation.
        by_head: whether the fused projection has queries, keys and values of a head next to each other.
    """

    architecture: str
    activation: str
    by_head: bool = False


#: The sources by the type of the model.
_SOURCES = {
    "gpt2": _Source("gpt2", "mlp.act"),
    "gpt_bigcode": _Source("starcoder", "mlp.act"),
    "mpt": _Source("mpt", "ffn.act"),
    "bloom": _Source("bloom", "mlp.gelu_impl", by_head=True),
    "gpt_neox": _Source("gptneox", "mlp.act", by_head=True),
}
_NORM = ("token_embd_norm.weight", "token_embd_norm.bias")
#: Architectures of llama.cpp that need a bias in every projection and norm. The others take a model without biases.
_BIASED = ("gpt2", "bloom", "gptneox")


def vectors(parts: ModelParts) -> GgufForm:
    """Vectors that are added to the embeddings, as a table of positions."""
    if parts.additive is None:
        raise UnsupportedError("the scheme adds no vectors to the embeddings")
    return _with_vectors(parts, _sequential(parts, "gpt2", "the architecture 'gpt2' with a table of positions"))


def alibi_after_norm(parts: ModelParts) -> GgufForm:
    """ALiBi in BLOOM, which also normalises its embeddings."""
    refuse_other_biases(parts)
    return _sequential(parts, "bloom", "the architecture 'bloom', which has ALiBi")


def alibi_and_vectors(parts: ModelParts) -> GgufForm:
    """ALiBi, vectors, both, or none of them."""
    needs = parts.needs()
    biased = any(kind in needs for kind in BIASES)
    if biased:
        refuse_other_biases(parts)
    names = ["ALiBi"] * biased + ["a table of positions"] * (Need.VECTORS in needs)
    what = " and ".join(names) or "no positions"
    form = _with_vectors(parts, _sequential(parts, "mpt", f"the architecture 'mpt' with {what}"))
    if biased:
        form.metadata["attention.max_alibi_bias"] = _ALIBI
    return form


def _rotated(parts: ModelParts, rotations: list[Rotation], entries: Metadata, what: str) -> GgufForm:
    """GPT-NeoX's blocks."""
    form = _form(parts, "gptneox", f"the architecture 'gptneox'{what}")
    # Unlike the others, this architecture does not read its output from the embeddings.
    form.tensors.setdefault("output.weight", form.tensors["token_embd.weight"])
    form.metadata["use_parallel_residual"] = bool(getattr(parts.stack.config, "use_parallel_residual", False))
    rotate_halves(form, rotations, entries)
    return form


_is_gpt = of_types(*_SOURCES)
CARRIERS = (
    Carrier("gpt2", vectors, (Need.VECTORS,), _is_gpt),
    # BLOOM also normalises its embeddings.
    Carrier("bloom", alibi_after_norm, BIASES, of_types("bloom")),
    Carrier("mpt", alibi_and_vectors, (*BIASES, Need.VECTORS), _is_gpt),
    Carrier("gptneox with rope.scaling", partial(stated_rotation, _rotated, scaled=True), (Need.MAP,), _is_gpt),
    Carrier("gptneox", partial(stated_rotation, _rotated, scaled=False), (Need.MAP,), _is_gpt),
)


def _sequential(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    if getattr(parts.stack.config, "use_parallel_residual", False):
        raise UnsupportedError(
            "the model adds attention and feed-forward to the same residual; this architecture of llama.cpp adds one "
            "after the other"
        )
    return _form(parts, architecture, carrier)


def _with_vectors(parts: ModelParts, form: GgufForm) -> GgufForm:
    if parts.additive is not None:
        form.tensors["position_embd.weight"] = rows_of(parts.additive, int(form.metadata["context_length"]))
    return form


def _form(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    """The weights and hyperparameters of GPT-like blocks, without a position encoding."""
    model, stack, name = parts.model, parts.stack, parts.name
    config, attention, source = stack.config, stack.attentions[0], _SOURCES[model.config.model_type]
    refuse_without_logits(parts)
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        raise UnsupportedError(f"{name} adds its residuals after the norms; these blocks of llama.cpp add them before")
    modules = model.named_modules(remove_duplicate=False)
    activations = [key for key, _ in modules if key.endswith(f".{source.activation}")]
    if len(activations) != len(parts.layers):
        raise UnsupportedError(
            f"{name} has {len(activations)} modules {source.activation} in {len(parts.layers)} layers"
        )
    refuse_other_activations(model, activations)
    tensors = _weights(parts, source)
    clamp, factors = getattr(getattr(config, "attn_config", None), "clip_qkv", None), logit_factors(parts)
    if clamp and factors:
        raise UnsupportedError("the model clips queries and scales its logits by another factor than llama.cpp")
    for index, factor in factors.items():
        scale_queries(tensors, index, attention.num_heads * attention.head_dim, factor)
    if architecture != "bloom" and _NORM[0] in tensors:
        _normalize_embeddings(tensors, _epsilon(stack.module))
    if architecture in _BIASED:
        for key in [key for key in tensors if key.startswith(("blk.", "output_norm.")) and key.endswith(".weight")]:
            zeros = torch.zeros(tensors[key].shape[0])
            tensors.setdefault(f"{key.removesuffix('.weight')}.bias", zeros)
    metadata = sizes(parts, tensors, model_length(parts)) | {
        "attention.head_count_kv": attention.num_key_value_heads,
        "attention.layer_norm_epsilon": _epsilon(stack.module),
    }
    if clamp:
        if architecture != "mpt":
            raise UnsupportedError(f"{name} clips queries, keys and values, which {architecture!r} does not")
        metadata["attention.clamp_kqv"] = float(clamp)
    return GgufForm(architecture, metadata, tensors, carrier=carrier)


def _weights(parts: ModelParts, source: _Source) -> dict[str, Tensor]:
    """The weights by their names in llama.cpp, with all queries first, and matrices as `(out, in)`."""
    attention = parts.stack.attentions[0]
    weights = named_weights(parts.model, source.architecture, len(parts.layers))
    weights.pop("position_embd.weight", None)  # The scheme has it.
    by_head = source.by_head
    if parts.model.config.model_type == "gpt_bigcode":
        by_head = attention.num_key_value_heads > 1  # With one key head, all queries come first.
    if by_head:
        for key in [key for key in weights if ".attn_qkv." in key]:
            rows = weights[key].unflatten(0, (attention.num_heads, 3, attention.head_dim))
            weights[key] = rows.transpose(0, 1).flatten(0, 2)
    return weights


def _normalize_embeddings(tensors: dict[str, Tensor], epsilon: float) -> None:
    """Stores the normalised embeddings, which are all that the layers see. The output uses the original ones."""
    embeddings = tensors["token_embd.weight"]
    weight, bias = (tensors.pop(name).float() for name in _NORM)
    tensors.setdefault("output.weight", embeddings)
    tensors["token_embd.weight"] = nn.functional.layer_norm(embeddings.float(), weight.shape, weight, bias, epsilon)


def _epsilon(stack: nn.Module) -> float:
    """The epsilon of the first norm. The comparison finds a norm with another one."""
    return next(float(module.eps) for module in stack.modules() if isinstance(module, nn.LayerNorm))
