"""How large the parts of a tiny model are that read pictures, sound and series: by name of the config attribute."""

from __future__ import annotations

import re
from typing import Any

#: Ids above those of ordinary tokens: placeholders of pictures and sound, and what surrounds them.
SPECIAL_TOKENS = 128
COMPOSITE_VOCABULARY = 192

#: The numbers of a config that become another one in a model that reads more than text.
_NAMES = {
    2: (
        "depth layers num_spatial_layers num_temporal_layers num_auxiliary_layers decoder_num_hidden_layers "
        "speech_encoder_layers t2u_encoder_layers t2u_decoder_layers conf_num_hidden_layers resampler_depth "
        "encoder_num_hidden_layers memory_attention_num_layers"
    ),
    64: (
        "projection_dim out_hidden_size text_hidden_size projector_hidden_size decoder_hidden_size "
        "encoder_hidden_size mlp_dim output_hidden_size output_dim image_text_hidden_size project_dim "
        "decoder_intermediate_size vision_output_dim projection_hidden_dim projection_hidden_size "
        "projection_intermediate_size embed_dim output_proj_dims alignment_intermediate_size fusion_hidden_size "
        "adapter_out_dim adapter_in_dim downsample_hidden_size encoder_hidden_dim encoder_feedforward_dim "
        "dim_feedforward projection_size fpn_hidden_size output_channels audio_hidden_size condition_dim "
        "adapter_input_size upsample_groups cross_hidden_size pooler_output_size mm_embed_dim "
        "speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim max_2d_position_embeddings "
        "reassemble_hidden_size bottleneck_features post_conv_in_channels mit_hidden_size"
    ),
    4: (
        "mm_tokens_per_image image_embedding_size cross_num_attention_heads cross_num_key_value_heads "
        "speech_encoder_attention_heads conf_num_attention_heads decoder_num_attention_heads "
        "encoder_num_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads resampler_n_heads "
        "decoder_num_key_value_heads encoder_num_key_value_heads resampler_n_latents num_denoising "
        "num_conv_pos_embedding_groups"
    ),
    16: (
        "cross_head_dim context_size n_window num_position_embeddings num_query_tokens num_queries latent_query_num "
        "num_conv_pos_embeddings"
    ),
    32: (
        "n_window_infer classifier_proj_size codevector_dim proj_codevector_dim xvector_output_dim num_mel_bins "
        "input_feat_size mel_dim num_codevectors_per_group codebook_size num_embeddings head_hidden_size"
    ),
    8: "prediction_length",
    COMPOSITE_VOCABULARY: "text_vocab_size",
}
SHRUNK_NUMBERS: dict[str, Any] = {name: number for number, names in _NAMES.items() for name in names.split()}

#: Lists with an entry for each stage: every entry becomes this.
SHRUNK_LISTS: dict[str, Any] = {
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("conv_dim", "tdnn_dim"), 16),
    **dict.fromkeys(("depths",), 2),
    **dict.fromkeys(("decoder_in_channels",), 64),
}

#: Lists of indices of layers; they become the indices of the layers that are left.
LAYER_INDICES = frozenset(
    (
        *("deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes", "window_block_indices"),
        *("intermediate_layers_indices", "spatial_target_layers", "extract_layers", "kv_source_layers"),
        *("rope_scaling_layers", "window_block_indexes", "subsample_layers", "summary_idxs"),
    )
)

_SPECIAL = re.compile(r"(token_id|token_index|_token|_token_idx|_patch_index|_id|_idx)$")


def is_special_token(name: str, value: Any) -> bool:
    """Whether an attribute of a config is the id of a special token."""
    return isinstance(value, int) and not isinstance(value, bool) and bool(_SPECIAL.search(name)) and value > 2
