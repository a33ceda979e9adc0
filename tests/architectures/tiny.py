"""A tiny random model of any text architecture of transformers, made from its default config by one set of rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

VOCABULARY = 128
WINDOW = 8
#: Ids of real tokens start here; below are padding, begin and end.
FIRST_TOKEN = 8

#: Entries of the mappings that are not text models of their own: wrappers around a text model that has its own entry,
#: models that also need pixels, audio, bytes in patches or entities.
COMPOSITE = frozenset(
    ["blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "trocr", "whisper", "layoutlm", "luke", "modernvbert", "perceiver", "tapas", "ultravbert"]
)
#: The same class under another name.
ALIASES = frozenset(("gpt-sw3", "internlm3", "iquestcoder"))

#: What a config attribute of this name becomes, wherever a config has it.
_SHRUNK: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size"), VOCABULARY
    ),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "word_embed_proj_dim"), 64
    ),
    **dict.fromkeys(("attention_hidden_size", "pooler_hidden_size", "prediction_head_size", "lru_width"), 64),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "embedding_dim", "true_hidden_size"), 64),
    **dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads"), 4
    ),
    **dict.fromkeys(("attention_heads", "num_heads", "swa_num_attention_heads", "num_query_groups"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "d_head", "d_kv", "global_head_dim"), 16),
    **dict.fromkeys(("kv_channels", "attention_head_size"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_inner", "dim_ff"), 64),
    **dict.fromkeys(
        ("dff", "d_ff", "hidden_dim", "ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp"), 64
    ),
    **dict.fromkeys(("dense_intermediate_size", "feed_forward_size", "n_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "topk_method_k"), 2),
    **dict.fromkeys(("topk_group", "n_group", "num_expert_group", "num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "router_hidden_size", "laurel_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("hc_lowrank", "gated_norm_rank", "d_rel", "ple_embed_dim", "adapter_rank", "embedding_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), 64),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length"), 64),
    **dict.fromkeys(
        ("sliding_window", "local_attention", "attention_window_size", "sliding_window_size", "window_size"), WINDOW
    ),
    **dict.fromkeys(("rel_extent", "attention_chunk_size", "keep_window_size"), 64),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads"), 8),
    **dict.fromkeys(
        ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "linear_head_dim", "ssm_state_size", "state_size"), 16
    ),
    **dict.fromkeys(("mamba_d_state", "time_step_rank", "mamba_dt_rank"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_n_groups", "n_groups", "mamba_ngroups"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("pad_token_id", "pad_index", "pad_token", "document_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "cls_token_id", "decoder_start_token_id", "bos_index"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "eod_token_id", "forced_eos_token_id", "eos_index"), 2),
    **dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id", "mask_token_id", "mask_index"), 3),
    **dict.fromkeys(("unk_index",), 4),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks", "num_layers_per_stack"), 2),
    **dict.fromkeys(("initializer_range", "init_std", "emb_init_std"), 0.2),
}

#: Entries of a config that hold one value per layer; cut to the layers of the tiny model.
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")

#: What the rules above cannot know.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "ffn_hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "per_layer_config": None,
        "head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
            "indexed_attention": {"rope_type": "default", "rope_theta": 8e7, "partial_rotary_factor": 0.5},
        },
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 64},
    "gemma4_text": {"per_layer_config": {"01": {"head_dim": 32}}},
    "gemma4_unified_text": {"per_layer_config": {"01": {"head_dim": 32}}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "hrm_text": {"num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "mobilebert": {"trigram_input": False, "intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48]},
    "xlstm": {"chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mem_rope": True,
    },
    "zaya": {"num_experts_per_tok": 1},
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One architecture under one head.

    Args:
        kind: "causal", "masked", "seq2seq" or "encoder".
        model_type: the config's model type.
        variant: a name for options other than the defaults; empty for the default config.
        options: those options.
    """

    kind: str
    model_type: str
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`causal-llama`, `masked-deberta[relative]`."""
        return f"{self.kind}-{self.model_type}" + (f"[{self.variant}]" if self.variant else "")


def default_pairs() -> list[Pair]:
    """Every text architecture under the causal and the masked head."""
    skipped = COMPOSITE | ALIASES
    causal = [Pair("causal", name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in skipped]
    masked = [Pair("masked", name) for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if name not in skipped]
    return sorted(causal, key=lambda pair: pair.model_type) + sorted(masked, key=lambda pair: pair.model_type)


def extra_pairs() -> list[Pair]:
    """Encoder-decoders, encoders, and options that a default config hides."""
    seq2seq = "t5 mt5 umt5 switch_transformers bart mbart marian pegasus m2m_100 blenderbot blenderbot-small plbart mvp nllb-moe "
    seq2seq += "pegasus_x bigbird_pegasus fsmt led longt5 prophetnet"

    ropes: list[tuple[str, dict[str, Any]]] = [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16}),
        (
            "longrope",
            {
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            "llama3",
            {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ("proportional", {"partial_rotary_factor": 0.5}),
    ]
    relative = (("relative_attention", True), ("pos_att_type", ["c2p", "p2c"]), ("position_biased_input", False))
    return [
        *(Pair("seq2seq", name) for name in seq2seq.split()),
        Pair("encoder", "t5"),
        Pair("encoder", "umt5"),
        *(
            Pair("causal", "llama", kind, (("rope_parameters", {"rope_type": kind, "rope_theta": 1e4} | options),))
            for kind, options in ropes
        ),
        Pair("masked", "esm", "rotary", (("position_embedding_type", "rotary"),)),
        Pair("masked", "deberta", "relative", relative),
        Pair("masked", "deberta-v2", "relative", relative),
        Pair("causal", "falcon", "new decoder", (("new_decoder_architecture", True),)),
        Pair("masked", "big_bird", "full", (("attention_type", "original_full"),)),
        Pair("causal", "big_bird", "full", (("attention_type", "original_full"),)),
        Pair("seq2seq", "bigbird_pegasus", "full", (("attention_type", "original_full"),)),
        Pair("causal", "falcon", "alibi", (("alibi", True),)),
        Pair("causal", "xlnet", "unidirectional", (("attn_type", "uni"),)),
        Pair("masked", "distilbert", "sinusoidal", (("sinusoidal_pos_embds", True),)),
        Pair("masked", "xlm", "sinusoidal", (("sinusoidal_embeddings", True),)),
        Pair("masked", "roformer", "rotary value", (("rotary_value", True),)),
    ]


def all_pairs() -> list[Pair]:
    """What the table in docs/architectures.md covers."""
    return default_pairs() + extra_pairs()


def tiny_config(pair: Pair, **options: Any) -> Any:
    """The shrunk config of a pair.

    Args:
        pair: the architecture.
        **options: fields that win over everything else.
    """
    config_class = CONFIG_MAPPING[pair.model_type]
    return config_class(**_shrunk(config_class(), pair, options))


def _shrunk(default: Any, pair: Pair, options: dict[str, Any]) -> dict[str, Any]:
    known = default.to_dict()
    given = {name: value for name, value in _SHRUNK.items() if _counts(known.get(name))}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        given[name] = _SHRUNK[name]
    if "kv_lora_rank" in given:
        given |= {"num_key_value_heads": 4, "head_dim": _SHRUNK["qk_rope_head_dim"]}
    layers = [_distinct(known[name]) for name in _PER_LAYER if isinstance(known.get(name), list | tuple)]
    count = max((2, *(len(kinds) for kinds in layers)))
    for name in ("num_layers", "num_hidden_layers"):
        if name in given:
            given[name] = count
    for name in _PER_LAYER:
        if isinstance(known.get(name), list | tuple):
            kinds = _distinct(known[name])
            given[name] = [kinds[min(layer, len(kinds) - 1)] for layer in range(count)]
    if pair.kind == "causal":
        given["is_decoder"] = True
    return given | _OVERRIDES.get(pair.model_type, {}) | dict(pair.options) | options


def _counts(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)


def _distinct(kinds: Any) -> list[Any]:
    return list(dict.fromkeys(kinds))


def model_class(pair: Pair) -> type[PreTrainedModel]:
    """The class of a pair's model."""
    if pair.kind in ("causal", "masked"):
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if pair.kind == "causal" else MODEL_FOR_MASKED_LM_MAPPING_NAMES
        return getattr(transformers, names[pair.model_type])  # type: ignore[no-any-return]
    if pair.kind == "encoder":
        return getattr(transformers, {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}[pair.model_type])  # type: ignore[no-any-return]
    return getattr(transformers, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[pair.model_type])  # type: ignore[no-any-return]


def tiny_model(pair: Pair, **options: Any) -> PreTrainedModel:
    """A model in evaluation mode whose every part, gates included, has an effect.

    Args:
        pair: the architecture.
        **options: fields of the config.
    """
    torch.manual_seed(0)
    model = model_class(pair)(tiny_config(pair, **options)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                _stir(module, parameter)
    return model


#: Kinds of layers that mix tokens by something else than softmax attention, alone or beside it.
_NOT_ATTENTION = frozenset(("linear_attention", "conv", "recurrent", "mamba", "mlp", "moe", "mlp_only"))

#: Architectures in which even one layer mixes neighbours, or attends twice, so that order is visible without positions.
MIXING = frozenset(
    ["convbert", "falcon_h1", "hrm_text", "inkling_text", "inkling2_text", "longcat_flash", "zamba", "zamba2", "zaya", "bigbird_pegasus", "olmo_hybrid"]
)

#: Architectures whose attention has no positions to begin with; their recurrent layers know the order.
WITHOUT_POSITIONS = frozenset(("jamba", "kimi_linear", "nemotron_h", "zamba"))

_WINDOWS = tuple(
    name for name, value in _SHRUNK.items() if (value == WINDOW and "window" in name) or name == "local_attention"
)

#: How to get one layer of attention where the number of layers alone does not do it.
_ONE_LAYER: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [0]},
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
    lists = [name for name in _PER_LAYER if isinstance(full.get(name), list | tuple)]
    kinds = [kind for name in lists if name != "mlp_layer_types" for kind in _distinct(full[name])]
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
    if not parameter.requires_grad or not parameter.is_floating_point() or "Sinusoidal" in type(module).__name__:
        return
    if isinstance(module, nn.Embedding):
        parameter.normal_(0.0, 1.0)
        if module.padding_idx is not None and module.padding_idx < len(parameter):
            parameter[module.padding_idx].zero_()
    elif parameter.dim() >= 2 and parameter.numel():
        fan_in = parameter[0].numel() if parameter.dim() == 2 else parameter.shape[-1]
        parameter.normal_(0.0, 1.2 / fan_in**0.5)
    elif parameter.numel() and (parameter == parameter[0]).all():
        parameter.add_(torch.randn_like(parameter) * 0.2)
