"""Other classes of transformers with the weights of a model, for schemes that its own class does not have.

RoFormer (arXiv:2104.09864) is a BERT with a rotation, MPNet (arXiv:2004.09297) a BERT with T5's bias, GPT-NeoX
(arXiv:2204.06745) with one residual after the other a GPT-2 with a rotation. SmolLM3 is a Llama with `no_rope_layers`
(arXiv:2501.18795 calls them NoPE layers).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import GPTNeoXConfig, MPNetConfig, PreTrainedConfig, PreTrainedModel, RoFormerConfig, SmolLM3Config

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import ModelParts, Rotation, rotations_of
from hf_posenc.export.stock.form import StockForm, current_config, stock_state
from hf_posenc.export.stock.rope_parameters import fold, rotation_parameters
from hf_posenc.schemes.bias.t5 import T5Bias

Config = TypeVar("Config", bound=PreTrainedConfig)
#: The start of the names of Llama-like classes, by the type of the model.
_LLAMAS = {"llama": "Llama", "mistral": "Mistral", "smollm3": "SmolLM3"}
#: Classes whose names differ in more than the name of the family.
_CLASSES = {"GPT2LMHeadModel": "GPTNeoXForCausalLM", "GPT2Model": "GPTNeoXModel"}
#: Parts of the names of a GPT-2's weights, and what they are in a GPT-NeoX; applied in this order.
_GPT_NEOX_NAMES = {
    r"^transformer\.": "gpt_neox.",
    r"\bwte\.": "embed_in.",
    r"\bh\.(\d+)\.": r"layers.\1.",
    r"\bln_1\.": "input_layernorm.",
    r"\bln_2\.": "post_attention_layernorm.",
    r"\bln_f\.": "final_layer_norm.",
    r"\battn\.c_attn\.": "attention.query_key_value.",
    r"\battn\.c_proj\.": "attention.dense.",
    r"\bmlp\.c_fc\.": "mlp.dense_h_to_4h.",
    r"\bmlp\.c_proj\.": "mlp.dense_4h_to_h.",
}
#: Parts of the names of a BERT's weights, and what they are in an MPNet.
_MPNET_NAMES = {
    r"^bert\.": "mpnet.",
    r"attention\.self\.(q|k|v)\w+\.": r"attention.attn.\1.",
    r"attention\.output\.dense\.": "attention.attn.o.",
    r"attention\.output\.LayerNorm\.": "attention.LayerNorm.",
    r"^cls\.predictions\.transform\.dense\.": "lm_head.dense.",
    r"^cls\.predictions\.transform\.LayerNorm\.": "lm_head.layer_norm.",
    r"^cls\.predictions\.": "lm_head.",
}
#: MPNet's own constants: they are in its code, not in its config.
_MPNET_BUCKETS, _MPNET_MAX_DISTANCE = 32, 128


def smollm3(parts: ModelParts) -> StockForm:
    """Returns a SmolLM3 with the weights of a Llama, in which some layers do not rotate.

    Raises:
        UnsupportedError: if the architecture has other weights, or the rotating layers rotate differently.
    """
    config, state = current_config(parts), stock_state(parts.model)
    model_class = _other_class(parts, "SmolLM3", _LLAMAS[config.model_type])
    if getattr(config, "sliding_window", None) is not None:
        raise UnsupportedError("The model has a sliding window, which a SmolLM3 applies in other layers.")
    rotations = rotations_of(parts, same=False)
    rotating = [rotation for rotation in rotations if rotation.rotary_dim]
    if len({(rotation.spectrum, rotation.scaling) for rotation in rotating}) > 1:
        raise UnsupportedError("The rotating layers differ, but a SmolLM3 has one rotation for all of them.")
    for layer, rotation in zip(parts.layers, rotations, strict=True):
        fold(state, layer, rotation, "half")
    shared, head_dim, length = (rotating or rotations)[0], rotations[0].head_dim, config.max_position_embeddings
    written = _converted(
        config,
        SmolLM3Config,
        no_rope_layers=[int(rotation.rotary_dim > 0) for rotation in rotations],
        rope_parameters=rotation_parameters(shared, head_dim, head_dim, parts.theta(), length),
    )
    written.head_dim = head_dim
    return StockForm(model_class, written, state, carrier=f"{model_class.__name__} with no_rope_layers")


def gpt_neox(parts: ModelParts) -> StockForm:
    """Returns a GPT-NeoX with the weights of a GPT-2.

    Raises:
        UnsupportedError: if there is no such class for the model, or its layers do not all have the same rotation.
    """
    config, model_class = current_config(parts), _other_class(parts, "GPT-NeoX", "GPT2")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise UnsupportedError("GPT-NeoX always divides its logits by the square root of the width of a head.")
    rotations = _turning(parts)
    head_dim = rotations[0].head_dim
    state = {}
    for key, value in stock_state(parts.model).items():
        if key.endswith("wpe.weight"):
            continue
        key = _renamed(key, _GPT_NEOX_NAMES)
        # GPT-2 stores the matrices of its layers transposed.
        value = value.T.contiguous() if value.ndim == 2 and ".layers." in f".{key}" else value
        layer = re.search(r"layers\.(\d+)\.attention\.query_key_value\.", key)
        state[key] = value if layer is None else _by_head(value, rotations[int(layer[1])])
    length = config.max_position_embeddings
    written = _converted(
        config,
        GPTNeoXConfig,
        max_position_embeddings=length,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        hidden_act=config.activation_function,
        layer_norm_eps=config.layer_norm_epsilon,
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
        use_parallel_residual=False,
        rope_parameters=rotation_parameters(rotations[0], rotations[0].rotary_dim, head_dim, parts.theta(), length),
    )
    return StockForm(model_class, written, state, carrier=f"{model_class.__name__} with its rotation")


def _by_head(rows: Tensor, rotation: Rotation) -> Tensor:
    """Reorders `(3 * heads * head_dim, ...)`, all queries first, to the queries, keys and values of each head."""
    query, key, value = rows.chunk(3)
    query, key = (rotation.folded(part, rotation.in_layout("half")) for part in (query, key))
    by_head = torch.stack([part.unflatten(0, (-1, rotation.head_dim)) for part in (query, key, value)], dim=1)
    return by_head.reshape(rows.shape)


def roformer(parts: ModelParts) -> StockForm:
    """Returns a RoFormer with the weights of a BERT. Its sinusoidal table, which it stores, takes any frequencies.

    Raises:
        UnsupportedError: if there is no such class for the model, or its layers do not all have the same rotation.
    """
    config, model_class = current_config(parts), _other_class(parts, "RoFormer", "Bert")
    table = "embeddings.position_embeddings.weight"
    state = {key: value for key, value in stock_state(parts.model).items() if not key.endswith(table)}
    if any("pooler" in key for key in state):
        raise UnsupportedError(
            "A RoFormer has no pooler, but this BertModel has one. If it is not used, load it with "
            "add_pooling_layer=False."
        )
    rotations = _turning(parts)
    first = rotations[0]
    if first.rotary_dim != first.head_dim:
        raise UnsupportedError("RoFormer rotates all dimensions of a head.")
    if first.scaling != 1.0:
        raise UnsupportedError("RoFormer does not scale cosine and sine.")
    for layer, rotation in zip(parts.layers, rotations, strict=True):
        fold(state, layer, rotation, "interleaved")
    # RoFormer reads its phases from a table, so they can be computed in float64.
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * first.frequencies
    prefix = model_class.base_model_prefix
    state = {_renamed(key, {r"^bert\.": f"{prefix}."}): value for key, value in state.items()}
    inside = "" if model_class.__name__ == "RoFormerModel" else f"{prefix}."
    phases = torch.cat((angles.sin(), angles.cos()), dim=-1)
    state[f"{inside}encoder.embed_positions.weight"] = phases.to(parts.model.dtype)
    written = _converted(config, RoFormerConfig)
    return StockForm(model_class, written, state, carrier=f"{model_class.__name__} with the phases in its table")


def mpnet(parts: ModelParts) -> StockForm:
    """Returns an MPNet with the weights of a BERT and the bias of the scheme.

    MPNet has no token types: type 0 becomes a part of every row of its table of positions. A BERT that distinguishes
    two texts is therefore only approximated.

    Raises:
        UnsupportedError: if there is no such class for the model, or its layers do not share a bias with its buckets.
    """
    config, model_class = current_config(parts), _other_class(parts, "MPNet", "Bert")
    bias = parts.layers[0].parts.logit_bias
    if not isinstance(bias, T5Bias) or any(layer.parts.logit_bias is not bias for layer in parts.layers):
        raise UnsupportedError("MPNet has one T5 bias, which all layers share.")
    expected = (_MPNET_BUCKETS, _MPNET_MAX_DISTANCE, True)
    if (bias.num_buckets, bias.max_distance, bias.bidirectional) != expected:
        raise UnsupportedError(f"MPNet always has {_MPNET_BUCKETS} buckets up to a distance of {_MPNET_MAX_DISTANCE}.")
    inside = "" if model_class.__name__ == "MPNetModel" else "mpnet."
    state = {_renamed(key, _MPNET_NAMES): value for key, value in stock_state(parts.model).items()}
    types = state.pop(f"{inside}embeddings.token_type_embeddings.weight")
    # Position 0 of MPNet is row 2 of its table. The first rows are for padding.
    length = config.max_position_embeddings + 2
    state[f"{inside}embeddings.position_embeddings.weight"] = types[:1].expand(length, -1).clone()
    state[f"{inside}encoder.relative_attention_bias.weight"] = bias.weight.detach().clone()
    written = _converted(config, MPNetConfig, max_position_embeddings=length)
    carrier, restriction = f"{model_class.__name__} with relative_attention_bias", ""
    if not torch.equal(types, types[:1].expand_as(types)):
        carrier = f"{carrier}, which reads all tokens as type 0"
        restriction = "MPNet has no token types, so it would read the second text of a pair as the first."
    return StockForm(model_class, written, state, carrier=carrier, restriction=restriction)


def _turning(parts: ModelParts) -> list[Rotation]:
    """The rotation of each layer, which is the same in all of them."""
    rotations = rotations_of(parts)
    if not rotations[0].rotary_dim:
        raise UnsupportedError("the scheme does not rotate")
    return rotations


def _other_class(parts: ModelParts, family: str, prefix: str) -> type[PreTrainedModel]:
    """The class of another family that takes the place of a model's class, whose name begins with `prefix`."""
    name = _CLASSES.get(parts.name, parts.name.replace(prefix, family, 1))
    model_class: type[PreTrainedModel] | None = getattr(transformers, name, None)
    config, more = parts.model.config, ("is_decoder", "add_cross_attention")
    named = next((field for field in more if getattr(config, field, False)), None)
    if model_class is None or named is not None:
        raise UnsupportedError(
            f"There is no {family} class for a {parts.name}{'' if named is None else f' with {named}=True'}."
        )
    return model_class


def _renamed(key: str, names: dict[str, str]) -> str:
    """The name of a weight in another class, by patterns that are applied in order."""
    for pattern, name in names.items():
        key = re.sub(pattern, name, key)
    return key


def _converted(config: Any, target: type[Config], **changed: Any) -> Config:
    """A config of another class, with the values that both classes have, except those that are given."""
    names = [field.name for field in dataclasses.fields(target) if hasattr(config, field.name)]
    return target(**{name: getattr(config, name) for name in names} | changed)
