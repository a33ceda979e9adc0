"""One row per architecture of different build: a tiny random model and what stock itself can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version

VOCABULARY = 96


@dataclass(frozen=True)
class ArchitectureRow:
    """Args:
    build: makes the model, given overrides of its config.
    causal: whether it can decode.
    static_cache: whether the stock model decodes with a StaticCache.
    position_ids: whether the model takes position ids, counted from 0.
    packs: whether stock separates packed documents by position ids.
    encoder_decoder: whether it needs decoder inputs too.
    sdpa: whether the class has sdpa beside eager.
    checkpointing: whether it supports gradient checkpointing.
    """

    build: Callable[..., Any]
    causal: bool = True
    static_cache: bool = True
    position_ids: bool = True
    packs: bool = True
    encoder_decoder: bool = False
    sdpa: bool = True
    checkpointing: bool = True


def _builder(model: str, config: str, **settings: Any) -> Callable[..., Any]:
    def build(**overrides: Any) -> Any:
        torch.manual_seed(0)
        made = getattr(transformers, config)(**(settings | overrides))
        built = getattr(transformers, model)._from_config(
            made, attn_implementation=overrides.get("attn_implementation", "eager")
        )
        return _enlarged(built).eval()

    return build


def _enlarged(model: Any) -> Any:
    """Weights large enough that attention, and so position, decides the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # The bias tables of the T5 family are added to logits as they are.
                parameter.normal_(std=0.6 if "relative_attention_bias" in name else 0.25)
    return model


_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

ARCHITECTURES: dict[str, ArchitectureRow] = {
    "llama_gqa": ArchitectureRow(_builder("LlamaForCausalLM", "LlamaConfig", **_LLAMA)),
    "gpt2": ArchitectureRow(_builder("GPT2LMHeadModel", "GPT2Config", **_GPT2)),
    "gptj": ArchitectureRow(
        _builder("GPTJForCausalLM", "GPTJConfig", **(_GPT2 | {"rotary_dim": 4})), static_cache=True, sdpa=False
    ),
    "gemma3_two_rotaries": ArchitectureRow(
        _builder(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **(_LLAMA | {"head_dim": 8, "sliding_window": 6}),
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "gpt_neox_partial": ArchitectureRow(
        _builder(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            **{key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"},
            rotary_pct=0.5,
        )
    ),
    "mistral_sliding": ArchitectureRow(_builder("MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=6)),
    "opt": ArchitectureRow(
        _builder(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0.0,
        ),
        packs=False,
    ),
    "bloom": ArchitectureRow(
        _builder(
            "BloomForCausalLM",
            "BloomConfig",
            hidden_size=32,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        position_ids=False,
        sdpa=False,
        # Before transformers 5.21 its own bias is as long as the input, not as the cache.
        static_cache=Version(transformers.__version__) >= Version("5.21"),
    ),
    "cohere2_interleaved": ArchitectureRow(
        _builder(
            "Cohere2ForCausalLM",
            "Cohere2Config",
            **(_LLAMA | {"sliding_window": 6}),
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "deepseek_v3_mla": ArchitectureRow(
        _builder(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **(_LLAMA | {"num_key_value_heads": 4}),
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
        )
    ),
    "bert": ArchitectureRow(_builder("BertForMaskedLM", "BertConfig", **_BERT), causal=False),
    "roberta": ArchitectureRow(
        _builder("RobertaForMaskedLM", "RobertaConfig", **_BERT, pad_token_id=1), causal=False, position_ids=False
    ),
    "modernbert": ArchitectureRow(
        _builder(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            **{key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"},
            local_attention=12,
            global_attn_every_n_layers=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        causal=False,
    ),
    "t5_encoder": ArchitectureRow(_builder("T5EncoderModel", "T5Config", **_T5), causal=False, position_ids=False),
    "bart": ArchitectureRow(
        _builder(
            "BartForConditionalGeneration",
            "BartConfig",
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            dropout=0.0,
        ),
        causal=False,
        position_ids=False,
        encoder_decoder=True,
    ),
}
