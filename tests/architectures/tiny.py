"""A tiny random model of any text architecture of transformers, made from its default config by one set of rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from .population import Pair, class_name, class_named
from .shrinking import OVERRIDES, PER_LAYER, SHRUNK, WINDOW
from .shrinking_parts import per_head, per_layer, shrunk_tree


def tiny_config(pair: Pair, **options: Any) -> Any:
    """The shrunk config of a pair."""
    config_class = CONFIG_MAPPING[pair.model_type]
    if not pair.has_vocabulary_head or {"encoder", "decoder"} <= set(config_class.sub_configs):
        return config_class(**shrunk_tree(config_class()) | dict(pair.options) | options)
    return config_class(**_shrunk(config_class(), pair, options))


def _shrunk(default: Any, pair: Pair, options: dict[str, Any]) -> dict[str, Any]:
    known = default.to_dict()
    given = {name: value for name, value in SHRUNK.items() if _counts(known.get(name))}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        given[name] = SHRUNK[name]
    given |= per_head(given) | per_layer(known, given)
    if pair.kind == "causal":
        given["is_decoder"] = True
    return given | OVERRIDES.get(pair.model_type, {}) | dict(pair.options) | options


def _counts(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)


def model_class(pair: Pair) -> type[PreTrainedModel]:
    """The class of a pair's model."""
    heads = {"causal": "CAUSAL_LM", "masked": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM"}
    if pair.kind == "encoder":
        name = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}[pair.model_type]
    else:
        name = class_name(pair.model_type, heads.get(pair.kind, ""))
    return class_named(name, pair.model_type)


def tiny_model(pair: Pair, **options: Any) -> PreTrainedModel:
    """A model in evaluation mode whose every part, gates included, has an effect."""
    torch.manual_seed(0)
    model = model_class(pair)(tiny_config(pair, **options)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                _stir(module, parameter)
    return model


#: Kinds of layers that mix tokens by something other than softmax attention, alone or next to it.
_NOT_ATTENTION = frozenset(("linear_attention", "conv", "recurrent", "mamba", "mlp", "moe", "mlp_only"))

#: Architectures in which even one layer mixes neighbours, or attends twice, so that order is visible without positions.
MIXING = frozenset(
    [
        *("convbert", "falcon_h1", "hrm_text", "inkling_text", "inkling2_text", "inkling2_loop_text", "longcat_flash"),
        *("zamba", "zamba2", "zaya", "bigbird_pegasus", "olmo_hybrid"),
    ]
)

#: Architectures whose attention has no positions natively; their recurrent layers know the order.
WITHOUT_POSITIONS = frozenset(("jamba", "kimi_linear", "nemotron_h", "zamba"))

_WINDOWS = tuple(
    name for name, value in SHRUNK.items() if (value == WINDOW and "window" in name) or name == "local_attention"
)

#: How to get one layer of attention where the number of layers alone does not do it.
_ONE_LAYER: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [0]},
    "dory": {"n_input_layers": 0, "n_recurrent_layers": 1, "n_output_layers": 0, "n_recurrent_loops": 1},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "recurrent_gemma": {"block_types": ["attention"]},
    "gpt_neo": {"attention_types": [[["global"], 1]]},
    "gemma4_text": {"per_layer_config": None},
    "gemma4_unified_text": {"per_layer_config": None},
}


def one_layer_models(pair: Pair) -> list[PreTrainedModel]:
    """Models in which the order of tokens is visible through positions only.

    Causal ones have a single layer, one model for each kind of attention layer, since a second layer sees prefixes and
    so an order. Bidirectional ones are as deep as ever. Windows are wider than the input.
    """
    if (
        pair.model_type in MIXING
        or pair.kind == "seq2seq"
        or (pair.kind == "masked" and tiny_config(pair).is_encoder_decoder)
    ):
        return []
    known = CONFIG_MAPPING[pair.model_type]().to_dict()
    wide = {name: 64 for name in _WINDOWS if _counts(known.get(name))}
    if pair.kind != "causal":
        return [tiny_model(pair, **wide)]
    full = tiny_config(pair).to_dict()
    lists = [name for name in PER_LAYER if isinstance(full.get(name), list | tuple)]
    kinds = [kind for name in lists if name != "mlp_layer_types" for kind in dict.fromkeys(full[name])]
    counts = {
        name: 1
        for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
        if name in known
    }
    models = []
    for kind in [kind for kind in dict.fromkeys(kinds) if kind not in _NOT_ATTENTION] or [None]:
        per_layer = {name: [full[name][-1]] if name == "mlp_layer_types" else [kind] for name in lists}
        models.append(tiny_model(pair, **wide | counts | per_layer | _ONE_LAYER.get(pair.model_type, {})))
    return models


def _stir(module: nn.Module, parameter: nn.Parameter) -> None:
    frozen = not parameter.requires_grad and bool(parameter.any())  # A frozen table of zeros waits for its values.
    if frozen or not parameter.is_floating_point() or "Sinusoidal" in type(module).__name__:
        return
    if isinstance(module, nn.Embedding):
        parameter.normal_(0.0, 1.0)
        if module.padding_idx is not None and module.padding_idx < len(parameter):
            parameter[module.padding_idx].zero_()
    elif parameter.dim() >= 2 and parameter.numel():
        whole_row = parameter.dim() == 2 or isinstance(module, nn.modules.conv._ConvNd)
        fan_in = parameter[0].numel() if whole_row else parameter.shape[-1]
        parameter.normal_(0.0, 1.2 / fan_in**0.5)
    elif parameter.dim() and parameter.numel() and (parameter == parameter[0]).all():
        parameter.add_(torch.randn_like(parameter) * 0.2)
