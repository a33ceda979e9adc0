"""How large a tiny model is: values by name of the config attribute, for any architecture that has it."""

from __future__ import annotations

from typing import Any

VOCABULARY = 128
WINDOW = 8
#: Ids of real tokens start here; below are padding, begin and end.
FIRST_TOKEN = 8

#: The attributes of a config that become a number, wherever a config has them.
_NAMES: dict[float, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size",
    64: (
        "hidden_size d_model n_embd emb_dim dim embedding_size word_embed_proj_dim attention_hidden_size "
        "pooler_hidden_size prediction_head_size lru_width input_embedding_size output_embedding_size embedding_dim "
        "true_hidden_size intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_inner dim_ff dff d_ff "
        "hidden_dim ffn_hidden_size shared_intermediate_size intermediate_size_mlp dense_intermediate_size "
        "feed_forward_size n_inner max_position_embeddings n_positions max_seq_len n_ctx model_max_length "
        "max_target_positions max_source_positions context_length rel_extent attention_chunk_size keep_window_size"
    ),
    4: (
        "num_attention_heads encoder_attention_heads decoder_attention_heads n_head n_heads attention_heads "
        "num_heads swa_num_attention_heads num_query_groups num_encoder_attention_heads num_decoder_attention_heads "
        "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num mamba_chunk_size chunk_size "
        "mamba_n_groups n_groups mamba_ngroups linear_num_key_heads linear_num_value_heads unk_index"
    ),
    2: (
        "num_key_value_heads swa_num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token "
        "moe_topk moe_k eos_token_id sep_token_id eod_token_id forced_eos_token_id num_layers num_hidden_layers "
        "n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_blocks "
        "num_layers_per_stack"
    ),
    16: (
        "head_dim swa_head_dim dim_head d_head d_kv kv_channels attention_head_size q_lora_rank kv_lora_rank "
        "v_head_dim router_hidden_size laurel_rank hc_lowrank gated_norm_rank d_rel ple_embed_dim adapter_rank "
        "embedding_rank mamba_d_head mamba_head_dim mamba_headdim linear_head_dim ssm_state_size state_size "
        "mamba_d_state time_step_rank mamba_dt_rank linear_key_head_dim linear_value_head_dim"
    ),
    32: (
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "expert_ffn_hidden_size moe_shared_expert_intermediate_size"
    ),
    1: (
        "topk_group n_group num_expert_group num_shared_experts n_shared_experts moe_num_shared_experts "
        "first_k_dense_replace num_dense_layers bos_token_id cls_token_id decoder_start_token_id"
    ),
    WINDOW: (
        "qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input sliding_window local_attention "
        "attention_window_size sliding_window_size window_size mamba_n_heads mamba_num_heads linear_num_heads"
    ),
    0: "pad_token_id document_token_id",
    3: "image_token_id video_token_id audio_token_id mask_token_id mask_index",
    0.2: "initializer_range init_std",
}
SHRUNK: dict[str, Any] = {name: number for number, names in _NAMES.items() for name in names.split()}

#: Entries of a config that hold one value per layer; cut to the layers of the tiny model.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")

#: Exceptions from the rules above.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
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
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3},
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
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "num_hidden_layers": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
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
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "use_mem_rope": True,
    },
    "zaya": {"num_experts_per_tok": 1},
}
