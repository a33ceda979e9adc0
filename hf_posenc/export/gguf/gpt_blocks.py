"""GPT-like models: LayerNorm before attention and before a feed-forward with GELU, one projection for all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.gelu import refuse_other_activations
from hf_posenc.export.gguf.names import named_weights
from hf_posenc.export.gguf.parts import ModelParts, refuse_without_logits
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.lengths import native_length

#: Length of a model that states none (BLOOM). It only says how long prompts may be in llama-server.
_LENGTH = 2048


@dataclass(frozen=True)
class _Source:
    """How a class of transformers stores these blocks.

    Args:
        architecture: the architecture of llama.cpp with its names of weights.
        activation: the module of a layer that computes the activation.
        by_head: whether the fused projection has queries, keys and values of a head next to each other.
        one_more_norm: whether tokens are normalised after the embeddings.
    """

    architecture: str
    activation: str
    by_head: bool = False
    one_more_norm: bool = False


_SOURCES = {
    "gpt2": _Source("gpt2", "mlp.act"),
    "gpt_bigcode": _Source("starcoder", "mlp.act"),
    "mpt": _Source("mpt", "ffn.act"),
    "bloom": _Source("bloom", "mlp.gelu_impl", by_head=True, one_more_norm=True),
    "gpt_neox": _Source("gptneox", "mlp.act", by_head=True),
}
_NORM = ("token_embd_norm.weight", "token_embd_norm.bias")
#: Architectures of llama.cpp that need a bias in every projection and norm. The others take a model without.
_BIASED = ("gpt2", "bloom", "gptneox")


def is_gpt(model: PreTrainedModel) -> bool:
    """Whether a model has these blocks."""
    return model.config.model_type in _SOURCES


def has_one_more_norm(model: PreTrainedModel) -> bool:
    """Whether a model also normalises its embeddings."""
    return is_gpt(model) and _SOURCES[model.config.model_type].one_more_norm


def gpt_form(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    """Returns the weights and hyperparameters of GPT-like blocks, without a position encoding.

    Args:
        parts: the model.
        architecture: an architecture of llama.cpp with these blocks.
        carrier: what will carry the scheme.

    Raises:
        UnsupportedError: for a model with other blocks.
    """
    model, stack = parts.model, parts.stack
    config, attention, name = stack.config, parts.stack.attentions[0], type(parts.model).__name__
    source = _SOURCES[model.config.model_type]
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
        _add_biases(tensors)
    metadata: dict[str, int | float | str | bool] = {
        "block_count": len(parts.layers),
        "context_length": context_length(parts),
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


def context_length(parts: ModelParts) -> int:
    """Number of tokens that the file is made for."""
    placed = current_encoding(parts.model)
    lengths = None if placed is None else placed.lengths
    known = native_length(parts.model, [parts.stack]) if lengths is None else lengths.current
    longest = None if lengths is None else lengths.reach.length
    # BLOOM's checkpoints state their length in a field that its config class does not have.
    length = known or getattr(parts.stack.config, "seq_length", None) or _LENGTH
    return int(length if longest is None else min(length, longest))


def map_queries_and_keys(form: GgufForm, head_dim: int, change: Callable[[int, Tensor], Tensor]) -> None:
    """Changes the rows of every query and key head.

    Args:
        form: the model.
        head_dim: width of a head.
        change: is given the index of a layer and rows `(heads, head_dim, in)` in float32, and returns such rows.
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


def _add_biases(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(("blk.", "output_norm.")) and name.endswith(".weight")]:
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias not in tensors:
            tensors[bias] = torch.zeros(tensors[name].shape[0])


def _epsilon(stack: nn.Module) -> float:
    """That of the first norm. The comparison finds a norm with another one."""
    return next(float(module.eps) for module in stack.modules() if isinstance(module, nn.LayerNorm))
