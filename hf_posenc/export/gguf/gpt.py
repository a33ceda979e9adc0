"""GPT-like models in llama.cpp: LayerNorm before attention and before a feed-forward with GELU, one projection for all
heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm, Metadata
from hf_posenc.export.gguf.gelu import refuse_other_activations
from hf_posenc.export.gguf.names import named_weights
from hf_posenc.export.gguf.parts import (
    ModelParts,
    Rotation,
    geometric_entries,
    model_length,
    refuse_other_biases,
    refuse_other_parts,
    refuse_without_logits,
    rotations_of,
    scaled_rotations,
)
from hf_posenc.export.layers import STOPPED, rows_of

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


#: By the type of the model.
SOURCES = {
    "gpt2": _Source("gpt2", "mlp.act"),
    "gpt_bigcode": _Source("starcoder", "mlp.act"),
    "mpt": _Source("mpt", "ffn.act"),
    "bloom": _Source("bloom", "mlp.gelu_impl", by_head=True),
    "gpt_neox": _Source("gptneox", "mlp.act", by_head=True),
}
_NORM = ("token_embd_norm.weight", "token_embd_norm.bias")
#: Architectures of llama.cpp that need a bias in every projection and norm. The others take a model without.
_BIASED = ("gpt2", "bloom", "gptneox")


def vectors(parts: ModelParts) -> GgufForm:
    """Vectors that are added to the embeddings, as a table of positions."""
    refuse_other_parts(parts, "additive")
    if parts.encoding.additive is None:
        raise UnsupportedError("the scheme adds no vectors to the embeddings")
    return _with_vectors(parts, _sequential(parts, "gpt2", "the architecture 'gpt2' with a table of positions"))


def alibi_after_norm(parts: ModelParts) -> GgufForm:
    """ALiBi in BLOOM, which also normalises its embeddings."""
    refuse_other_parts(parts, "logit_bias")
    refuse_other_biases(parts)
    return _sequential(parts, "bloom", "the architecture 'bloom', which has ALiBi")


def alibi_and_vectors(parts: ModelParts) -> GgufForm:
    """ALiBi, vectors, both, or none of them."""
    refuse_other_parts(parts, "logit_bias", "additive")
    biased = any(layer.logit_bias is not None for layer in parts.layers)
    if biased:
        refuse_other_biases(parts)
    added = parts.encoding.additive is not None
    what = [name for name, found in (("ALiBi", biased), ("a table of positions", added)) if found]
    form = _sequential(parts, "mpt", f"the architecture 'mpt' with {' and '.join(what) or 'no positions'}")
    if biased:
        form.metadata["attention.max_alibi_bias"] = _ALIBI
    return _with_vectors(parts, form) if added else form


def scaled_rotation(parts: ModelParts) -> GgufForm:
    """RoPE with linear scaling or YaRN, with the options that llama.cpp reads."""
    entries, rotations = scaled_rotations(parts, rotations_of(parts))
    return _rotated(parts, rotations, entries, f"'gptneox' with rope.scaling.type {entries['rope.scaling.type']!r}")


def geometric_rotation(parts: ModelParts) -> GgufForm:
    """A rotation whose frequencies decrease by a constant factor; pairs may also stand still."""
    rotations = rotations_of(parts)
    turning = rotations[0].frequencies.abs()
    turning = turning[turning > 0].sort(descending=True).values
    if len(turning) == 0:
        stopped: Metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": STOPPED}
        return _rotated(parts, rotations, {"rope.freq_base": 10000.0, **stopped}, "'gptneox' with stopped positions")
    entries = geometric_entries(turning)
    if entries is None:
        raise UnsupportedError("the frequencies do not decrease by a constant factor from pair to pair")
    return _rotated(parts, rotations, entries, "'gptneox'")


def _rotated(parts: ModelParts, rotations: list[Rotation], entries: Metadata, name: str) -> GgufForm:
    """GPT-NeoX's blocks. llama.cpp rotates the first dimensions of a head, pair `m` at `m` and `m + pairs`."""
    form, head_dim = _form(parts, "gptneox", f"the architecture {name}"), parts.layers[0].head_dim
    # Unlike the others, this architecture does not read its output from the embeddings.
    form.tensors.setdefault("output.weight", form.tensors["token_embd.weight"])
    frequencies = rotations[0].frequencies
    turning = [pair for pair in frequencies.abs().argsort(descending=True, stable=True).tolist() if frequencies[pair]]
    # A pair that turns backwards turns forwards with its dimensions exchanged.
    first = [2 * pair + int(frequencies[pair] < 0) for pair in turning]
    order = [*first, *(dimension ^ 1 for dimension in first)]
    order += [dimension for dimension in range(head_dim) if dimension // 2 not in turning]
    _map_queries_and_keys(form, head_dim, lambda layer, rows: rotations[layer].folded(rows)[:, order])
    parallel = bool(getattr(parts.stack.config, "use_parallel_residual", False))
    width = 2 * len(turning) or head_dim
    form.metadata.update({"use_parallel_residual": parallel, "rope.dimension_count": width, **entries})
    return form


def _sequential(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    if getattr(parts.stack.config, "use_parallel_residual", False):
        raise UnsupportedError(
            "the model adds attention and feed-forward to the same residual; this architecture of llama.cpp adds one "
            "after the other"
        )
    return _form(parts, architecture, carrier)


def _with_vectors(parts: ModelParts, form: GgufForm) -> GgufForm:
    count = form.metadata["context_length"]
    assert parts.encoding.additive is not None
    assert isinstance(count, int)
    form.tensors["position_embd.weight"] = rows_of(parts.encoding.additive, count)
    return form


def _form(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    """The weights and hyperparameters of GPT-like blocks, without a position encoding."""
    model, stack = parts.model, parts.stack
    config, attention, name = stack.config, parts.stack.attentions[0], type(parts.model).__name__
    source = SOURCES[model.config.model_type]
    refuse_without_logits(parts)
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        raise UnsupportedError(f"{name} adds its residuals after the norms; these blocks of llama.cpp add them before")
    if len(stack.attentions) != len(parts.layers) or len({one.num_heads for one in stack.attentions}) > 1:
        raise UnsupportedError(f"the layers of {name} have different numbers of heads")
    modules = model.named_modules(remove_duplicate=False)
    activations = [key for key, _ in modules if key.endswith(f".{source.activation}")]
    if len(activations) != len(parts.layers):
        raise UnsupportedError(
            f"{name} has {len(activations)} modules {source.activation} in {len(parts.layers)} layers"
        )
    refuse_other_activations(model, activations)
    tensors = _weights(parts, source)
    clamp = getattr(getattr(config, "attn_config", None), "clip_qkv", None)
    _scale_queries(parts, tensors, clamp)
    if architecture != "bloom" and _NORM[0] in tensors:
        _normalize_embeddings(tensors, _epsilon(stack.module))
    if architecture in _BIASED:
        for key in [key for key in tensors if key.startswith(("blk.", "output_norm.")) and key.endswith(".weight")]:
            zeros = torch.zeros(tensors[key].shape[0])
            tensors.setdefault(f"{key.removesuffix('.weight')}.bias", zeros)
    metadata: Metadata = {
        "block_count": len(parts.layers),
        "context_length": model_length(parts),
        "embedding_length": tensors["token_embd.weight"].shape[1],
        "feed_forward_length": tensors["blk.0.ffn_up.weight"].shape[0],
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_key_value_heads,
        "attention.layer_norm_epsilon": _epsilon(stack.module),
        "vocab_size": int(config.vocab_size),
    }
    if clamp:
        if architecture != "mpt":
            raise UnsupportedError(f"{name} clips queries, keys and values, which {architecture!r} does not")
        metadata["attention.clamp_kqv"] = float(clamp)
    return GgufForm(architecture, metadata, tensors, carrier)


def _map_queries_and_keys(form: GgufForm, head_dim: int, change: Callable[[int, Tensor], Tensor]) -> None:
    """Changes the rows of every query and key head.

    `change` gets the index of a layer and rows `(heads, head_dim, in)` in float32, and returns such rows.
    """
    heads, key_heads = form.metadata["attention.head_count"], form.metadata["attention.head_count_kv"]
    assert isinstance(heads, int)
    assert isinstance(key_heads, int)
    for layer in range(int(form.metadata["block_count"])):
        for suffix in ("weight", "bias"):
            name = f"blk.{layer}.attn_qkv.{suffix}"
            if name in form.tensors:
                rows = form.tensors[name].float().clone()
                changed = (heads + key_heads) * head_dim
                by_head = rows[:changed].reshape(heads + key_heads, head_dim, -1)
                both = [change(layer, by_head[:heads]), change(layer, by_head[heads:])]
                rows[:changed] = torch.cat(both).reshape(rows[:changed].shape)
                form.tensors[name] = rows


def _weights(parts: ModelParts, source: _Source) -> dict[str, Tensor]:
    """The weights by their names in llama.cpp, with all queries first, and matrices as `(out, in)`."""
    model, attention = parts.model, parts.stack.attentions[0]
    found = named_weights(model, source.architecture, len(parts.layers))
    found.pop("position_embd.weight", None)  # The scheme has it.
    by_head = source.by_head
    if model.config.model_type == "gpt_bigcode":
        by_head = attention.num_key_value_heads > 1  # With one key head, all queries come first.
    if by_head:
        for key in [key for key in found if ".attn_qkv." in key]:
            rows = found[key].unflatten(0, (attention.num_heads, 3, attention.head_dim))
            found[key] = rows.transpose(0, 1).flatten(0, 2)
    return found


def _scale_queries(parts: ModelParts, tensors: dict[str, Tensor], clamp: float | None) -> None:
    """llama.cpp divides logits by the root of the width of a head. Other factors are moved into the queries."""
    for layer, attention in enumerate(parts.stack.attentions):
        width = attention.head_dim
        names = ("scaling", "softmax_scale", "inv_norm_factor")
        scaling = next((getattr(attention.module, key) for key in names if hasattr(attention.module, key)), None)
        factor = 1.0 if scaling is None else float(scaling) * width**0.5
        if abs(factor - 1) <= 1e-6:
            continue
        if clamp:
            raise UnsupportedError("the model clips queries and scales its logits by another factor than llama.cpp")
        for suffix in ("weight", "bias"):
            key = f"blk.{layer}.attn_qkv.{suffix}"
            if key in tensors:
                tensors[key] = tensors[key].float().clone()
                tensors[key][: attention.num_heads * width] *= factor


def _normalize_embeddings(tensors: dict[str, Tensor], epsilon: float) -> None:
    """Stores the normalised embeddings, which are all that the layers see. The output uses the original ones."""
    embeddings = tensors["token_embd.weight"]
    weight, bias = (tensors.pop(name).float() for name in _NORM)
    tensors.setdefault("output.weight", embeddings)
    tensors["token_embd.weight"] = nn.functional.layer_norm(embeddings.float(), weight.shape, weight, bias, epsilon)


def _epsilon(stack: nn.Module) -> float:
    """That of the first norm. The comparison finds a norm with another one."""
    return next(float(module.eps) for module in stack.modules() if isinstance(module, nn.LayerNorm))
