"""One row per architecture of different build: a tiny random model and what stock itself can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.models import tiny_config
from tests.versions import before


@dataclass(frozen=True)
class ArchitectureRow:
    """Args:
    build: makes the model, given overrides of its config.
    causal: whether it can decode.
    static_cache: whether the stock model decodes with a StaticCache.
    position_ids: whether the model takes position ids, counted from 0.
    packs: whether stock separates packed documents by position ids.
    sdpa: whether the class has sdpa beside eager.
    checkpointing: whether it supports gradient checkpointing.
    """

    build: Callable[..., Any]
    causal: bool = True
    static_cache: bool = True
    position_ids: bool = True
    packs: bool = True
    sdpa: bool = True
    checkpointing: bool = True


def _builder(model: str, **settings: Any) -> Callable[..., Any]:
    def build(**overrides: Any) -> Any:
        torch.manual_seed(0)
        config = tiny_config(model, **(settings | overrides))
        built = getattr(transformers, model)._from_config(
            config, attn_implementation=overrides.get("attn_implementation", "eager")
        )
        return enlarged(built)

    return build


def enlarged(model: Any) -> Any:
    """Weights large enough that attention, and so position, decides the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and parameter.requires_grad:
                # The bias tables of the T5 family are added to logits as they are.
                parameter.normal_(std=0.6 if "relative_attention_bias" in name else 0.25)
    return model.eval()


ARCHITECTURES: dict[str, ArchitectureRow] = {
    "llama_gqa": ArchitectureRow(_builder("LlamaForCausalLM")),
    "gpt2": ArchitectureRow(_builder("GPT2LMHeadModel")),
    "gptj": ArchitectureRow(
        _builder("GPTJForCausalLM", rotary_dim=4), sdpa=bool(transformers.GPTJPreTrainedModel._supports_sdpa)
    ),
    "gemma3_two_rotaries": ArchitectureRow(
        _builder("Gemma3ForCausalLM", head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    ),
    "gpt_neox_partial": ArchitectureRow(_builder("GPTNeoXForCausalLM", rotary_pct=0.5)),
    "mistral_sliding": ArchitectureRow(_builder("MistralForCausalLM", sliding_window=6)),
    "opt": ArchitectureRow(_builder("OPTForCausalLM"), packs=False),
    "bloom": ArchitectureRow(
        _builder("BloomForCausalLM"),
        position_ids=False,
        sdpa=False,
        # Before transformers 5.21 its own bias is as long as the input, not as the cache.
        static_cache=not before("5.21"),
    ),
    "cohere2_interleaved": ArchitectureRow(
        _builder("Cohere2ForCausalLM", sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    ),
    "deepseek_v3_mla": ArchitectureRow(
        _builder(
            "DeepseekV3ForCausalLM",
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
        )
    ),
    "bert": ArchitectureRow(_builder("BertForMaskedLM"), causal=False),
    "roberta": ArchitectureRow(_builder("RobertaForMaskedLM", pad_token_id=1), causal=False, position_ids=False),
    "modernbert": ArchitectureRow(
        _builder(
            "ModernBertForMaskedLM",
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
    "t5_encoder": ArchitectureRow(_builder("T5EncoderModel"), causal=False, position_ids=False),
    "bart": ArchitectureRow(_builder("BartForConditionalGeneration"), causal=False, position_ids=False),
}
