"""Exceptions from the rules of `shrinking_parts`, by model type; also for configs inside other configs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

#: A backbone that needs no package besides transformers.
_RESNET: dict[str, Any] = {
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
    "backbone": None,
}
_RESNET_LEVELS: dict[str, Any] = _RESNET | {
    "backbone_config": _RESNET["backbone_config"] | {"out_features": ["stage2", "stage3", "stage4"]}
}
#: A perception encoder of timm in a small size.
PERCEPTION = {"embed_dim": 64, "depth": 2, "num_heads": 4, "patch_size": 4, "img_size": [16, 16]}
#: Two tiles side by side; the whole picture, smaller, is a third one.
TILES = [[16, 32], [32, 16]]


def _letters(number: int) -> str:
    """Digits as letters, as Chameleon names its image tokens."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


#: By one or several model types.
_BY_TYPES: dict[str, dict[str, Any]] = {
    "edgetam_vision_model": {
        "backbone_config": {"architecture": "repvit_m1"},
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "image_size": 64,
    },
    "fast_vlm": {
        "vision_config": {
            "model_args": {"inference_mode": True, "layers": [1] * 5, "embed_dims": [16, 32, 32, 64, 64]},
            "hidden_size": 128,
            "image_size": 128,
        }
    },
    "gemma3n_vision": {"model_args": {"channel_multiplier": 0.1}},
    "higgs_audio_v2_tokenizer": {
        "acoustic_model_config": {"downsampling_ratios": [8, 5, 4, 3, 2], "upsampling_ratios": [8, 5, 4, 3, 2]}
    },
    "pe_video_encoder": {"vision_config": {"image_size": 16, "model_args": PERCEPTION}},
    "perception_lm": {
        "vision_config": {"architecture": "vit_pe_core_large_patch14_336", "image_size": 16, "model_args": PERCEPTION}
    },
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "pp_ocrv5_server_det pp_ocrv6_medium_det": {
        "intraclass_block_config": defaultdict(lambda: [1, 1, 0]),  # Kernel, stride and padding of each convolution.
        "scale_factor_list": [1, 2, 4, 8],
        "kernel_list": [3, 2, 2],
    },
    "timm_backbone": {"backbone": "resnet18"},
    "apertus1p5": {"image_token_offset": 16, "audio_token_offset": 48},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "channel_multiplier": [1, 2], "attn_resolutions": []},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "autoformer informer time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "blip-2 instructblip": {"image_token_index": 128},
    "chameleon": {"vocabulary_map": {"<image>": 128, **{f"IMGIMG{_letters(i)}Z": 8 + i for i in range(32)}}},
    "conditional_detr dab-detr detr table-transformer": _RESNET,
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deformable_detr": _RESNET_LEVELS | {"num_feature_levels": 3},
    "diffusion_gemma_text": {
        "per_layer_config": None,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 128,
            "<|extra_200|>": 129,
            **{f"<|visual token {i:06}|>": 8 + i for i in range(32)},
        }
    },
    "fun_asr_nano_encoder": {"max_position_embeddings": 257},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16, "hidden_size": 64}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "granite4_vision": {
        "downsample_rate": "2/4",
        "image_grid_pinpoints": TILES,
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1],
    },
    "granite_speech granite_speech_plus": {"window_size": 15},
    "hunyuan_vl_text mistral4": {"head_dim": 16},
    "instructblipvideo": {"video_token_index": 128},
    "kosmos_2_5_vision_model pix2struct_vision_model": {"patch_embed_hidden_size": 48},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
    "llava_next llava_next_video llava_onevision": {"image_grid_pinpoints": TILES},
    "lw_detr_vit unlimited_ocr_vision mobilevitv2 pvt_v2": {"image_size": 64},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 16, 16]},
    "nemotron_h_omni": {
        "image_token_id": 128,
        "video_token_id": 129,
        "vit_hidden_size": 64,
    },
    "omdet-turbo": _RESNET_LEVELS
    | {
        "encoder_in_channels": [16, 32, 32],
        "apply_layernorm_after_vision_backbone": False,
        "text_projection_in_dim": 64,
        "text_projection_out_dim": 64,
        "class_embed_dim": 64,
        "task_encoder_hidden_dim": 64,
        "vision_features_channels": [32, 32, 32],
        "decoder_hidden_dim": 32,
        "d_model": 32,
        "decoder_dim_feedforward": 64,
        "decoder_num_heads": 4,
    },
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "window_positional_embedding_background_size": [4, 4],
        "window_size_per_stage": [8, 4, 2, 2],
        "global_attention_blocks": [3],
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "image_size": 64,
    },
    "speech_to_text": {"pad_token_id": 1},
    "step3p5": {"sliding_window": 8},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "timesfm": {"horizon_length": 16},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vitmatte": {
        "backbone_config": {"patch_size": 16, "image_size": 64},
        "fusion_hidden_sizes": [32, 32, 16, 16],
        "convstream_hidden_sizes": [16, 16, 16],
    },
    "vitpose_backbone": {"num_experts": 1, "part_features": 16, "patch_size": [16, 16], "image_size": [64, 48]},
    "align": {"projection_dim": 640},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [64, 64]},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [64, 64], "image_size": 64},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "mllama_vision_model": {"vision_output_dim": 192},
    "muse_glimmer muse_spark": {"out_hidden_size": 256},
    "tvp": {"num_frames": 2, "max_img_size": 64, "visual_prompt_size": 8},
    "clap_audio_model": {"spec_size": 64, "patch_embeds_hidden_size": 16, "hidden_size": 128},
    "clvp_encoder": {"num_attention_heads": 2},
    "hiera": {"patch_size": [7, 7], "image_size": [64, 64]},
    "levit": {"patch_size": 16},
    "superglue": {"hidden_size": 256},
    "qwen2_5_omni_thinker qwen3_omni_moe_thinker": {"vision_start_token_id": 150, "vision_end_token_id": 151},
    "gemma4_vision gemma4_unified_vision": {"pooling_kernel_size": 2},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0, 0.0]},
    "voxtral": {"audio_token_id": 128},
    "sam3_tracker": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "sam_mask_decoder": {"attention_downsample_rate": 1},
    "sam_hq_mask_decoder": {"vit_dim": 64},
    "dots3_note_text": {"index_topk": 4},
    "embedding_gemma2_text dots3_note_vision_encoder": {"per_layer_config": None},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 200, "class_order": list(range(200))},
    "granite_speech5_encoder": {"num_key_value_heads": 4, "num_mel_bins": 8},
    "depth_pro": {"patch_size": 16, "intermediate_hook_ids": [1, 0]},
    "emu3_vqgan": {
        "base_channels": 32,
        "embed_dim": 16,
        "channel_multiplier": [1, 2],
        "attn_resolutions": [],
    },
    "neucodec xcodec2": {"num_key_value_heads": 4, "quantization_dim": 128},
    "seggpt": {"image_size": [32, 16]},
    "efficientloftr": {"hidden_size": 256, "head_dim": 32, "num_key_value_heads": 8, "num_attention_heads": 8},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 64},
    "csm_depth_decoder_model": {"backbone_hidden_size": 64},
    "layoutlmv3": {"input_size": 64, "coordinate_size": 8, "shape_size": 16},
    "fastspeech2_conformer": {"num_mel_bins": 80},
    "sam_vision_model sam_hq_vision_model": {"num_pos_feats": 32},
    "lilt": {"hidden_size": 48},
    "blt_local_encoder blt_local_decoder": {"hidden_size_global": 64},
    "vjepa2": {
        "crop_size": 16,
        "frames_per_clip": 4,
        "pred_hidden_size": 64,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
    "qwen3_asr_encoder": {"n_window": 50, "n_window_infer": 200},
    "glm_image_vqmodel": {"latent_channels": 64},
    "chameleon_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 2],
        "embed_dim": 16,
        "resolution": 16,
        "attn_resolutions": [],
    },
    "vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_encoder vibevoice_acoustic_tokenizer_decoder": {
        "num_filters": 4,
        "depths": [1, 1, 1, 1, 1, 1, 1],
    },
    "wavtokenizer": {"codebook_dim": 64},
    "wavtokenizer_encoder": {"codebook_dim": 64, "num_filters": 4},
    "wav2vec2-bert wav2vec2-conformer": {"vocab_size": 32},
    "luke": {"entity_vocab_size": 16},
    "perceiver": {"num_latents": 16, "d_latents": 64},
}
OVERRIDES = {model_type: fields for types, fields in _BY_TYPES.items() for model_type in types.split()}
