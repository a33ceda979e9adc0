"""BERT with a rotation, as RoFormer (arXiv:2104.09864), and with T5's bias, as MPNet (arXiv:2004.09297)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import MPNetConfig, PreTrainedModel, RoFormerConfig

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import PlacedLayer, one_spectrum, placed_layers, refuse_beyond_rotation, refuse_vectors
from hf_posenc.export.stock.form import StockForm, copied, renamed, stock_config, stock_state
from hf_posenc.export.stock.spectrum import fold
from hf_posenc.schemes.bias.t5 import T5Bias

_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
    "id2label", "label2id", "problem_type", "classifier_dropout", "dtype",
)  # fmt: skip
#: MPNet's own constants: they are in its code, not in its config.
_MPNET_BUCKETS, _MPNET_MAX_DISTANCE = 32, 128
_POOLER = "A {} has no pooler, but this BertModel has one. If it is not used, load it with add_pooling_layer=False."


def roformer(model: PreTrainedModel) -> StockForm:
    """Returns a RoFormer with the weights of a BERT. Its sinusoidal table, which it stores, takes any frequencies.

    Raises:
        UnsupportedError: if the model is not a BERT, or its layers do not all have the same rotation.
    """
    layers, config, found = _bert(model, "RoFormer")
    refuse_beyond_rotation(layers, "RoFormer")
    table = "embeddings.position_embeddings.weight"
    state = {key: value for key, value in stock_state(model).items() if not key.endswith(table)}
    if any("pooler" in key for key in state):
        raise UnsupportedError(_POOLER.format("RoFormer"))
    spectra, first = one_spectrum(layers, "RoFormer")
    if first.rotary_dim != layers[0].attention.head_dim:
        raise UnsupportedError("RoFormer rotates all dimensions of a head.")
    if first.scaling != 1.0:
        raise UnsupportedError("RoFormer does not scale cosine and sine.")
    for layer, spectrum in zip(layers, spectra, strict=True):
        fold(state, layer, spectrum, "interleaved")
    # RoFormer reads its phases from a table, so they can be computed in float64.
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * first.frequencies
    prefix = found.base_model_prefix
    state = {renamed(key, {r"^bert\.": f"{prefix}."}): value for key, value in state.items()}
    inside = "" if found.__name__ == "RoFormerModel" else f"{prefix}."
    phases = torch.cat((angles.sin(), angles.cos()), dim=-1)
    state[f"{inside}encoder.embed_positions.weight"] = phases.to(model.dtype)
    written = RoFormerConfig(**copied(config, _COPIED))
    return StockForm(found, written, state, f"{found.__name__} with the phases in its table")


def mpnet(model: PreTrainedModel) -> StockForm:
    """Returns an MPNet with the weights of a BERT and the bias of the scheme.

    MPNet has no token types: type 0 becomes a part of every row of its table of positions. A BERT that tells two texts
    apart is therefore only approximated.

    Raises:
        UnsupportedError: if the model is not a BERT, or its layers do not share one bias with MPNet's buckets.
    """
    layers, config, found = _bert(model, "MPNet")
    bias = layers[0].logit_bias
    if not isinstance(bias, T5Bias) or any(layer.logit_bias is not bias for layer in layers):
        raise UnsupportedError("MPNet has one T5 bias, which all layers share.")
    if any(layer.logit_scale is not None or layer.query_key_map is not None for layer in layers):
        raise UnsupportedError("MPNet has a bias of distances and nothing else.")
    expected = (_MPNET_BUCKETS, _MPNET_MAX_DISTANCE, True)
    if (bias.num_buckets, bias.max_distance, bias.bidirectional) != expected:
        raise UnsupportedError(f"MPNet always has {_MPNET_BUCKETS} buckets up to a distance of {_MPNET_MAX_DISTANCE}.")
    inside = "" if found.__name__ == "MPNetModel" else "mpnet."
    state = {renamed(key, _MPNET_NAMES): value for key, value in stock_state(model).items()}
    types = state.pop(f"{inside}embeddings.token_type_embeddings.weight")
    table = f"{inside}embeddings.position_embeddings.weight"
    # Position 0 of MPNet is row 2 of its table. The first rows are for padding.
    state[table] = types[:1].expand(config.max_position_embeddings + 2, -1).clone()
    state[f"{inside}encoder.relative_attention_bias.weight"] = bias.weight.detach().clone()
    written = MPNetConfig(**copied(config, _COPIED) | {"max_position_embeddings": config.max_position_embeddings + 2})
    carrier, restriction = f"{found.__name__} with relative_attention_bias", ""
    if not torch.equal(types, types[:1].expand_as(types)):
        carrier = f"{carrier}, which reads all tokens as type 0"
        restriction = "MPNet has no token types, so it would read the second text of a pair as the first."
    return StockForm(found, written, state, carrier, restriction)


def _bert(model: PreTrainedModel, prefix: str) -> tuple[list[PlacedLayer], Any, type[PreTrainedModel]]:
    """The layers and stock config of a BERT, and the class that takes its place."""
    config, name = stock_config(model), type(model).__name__
    found = getattr(transformers, name.replace("Bert", prefix, 1), None)
    if found is None or getattr(config, "is_decoder", False):
        raise UnsupportedError(f"There is no {prefix} class for a {name}{' decoder' if found else ''}.")
    refuse_vectors(model, f"{prefix} is tried only for schemes that add no vectors to the embeddings.")
    config.max_position_embeddings = model.position_encoding.lengths.current or config.max_position_embeddings
    return placed_layers(model), config, found


#: Parts of the names of a BERT's weights, and what they are in an MPNet; applied in this order.
_MPNET_NAMES = {
    r"^bert\.": "mpnet.",
    r"attention\.self\.(q|k|v)\w+\.": r"attention.attn.\1.",
    r"attention\.output\.dense\.": "attention.attn.o.",
    r"attention\.output\.LayerNorm\.": "attention.LayerNorm.",
    r"^cls\.predictions\.transform\.dense\.": "lm_head.dense.",
    r"^cls\.predictions\.transform\.LayerNorm\.": "lm_head.layer_norm.",
    r"^cls\.predictions\.": "lm_head.",
}
