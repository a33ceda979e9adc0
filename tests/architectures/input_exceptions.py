"""Exceptions from the rules by argument name, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .input_context import Context
from .input_pictures import flattened, grid, picture_size
from .input_sounds import FRAMES, SAMPLES, bins, frames_first, spectrogram, wave_with_channel
from .input_tokens import BEFORE, with_placeholders

Rules = dict[str, Callable[[Context], Any]]


def absent(context: Context) -> None:
    """Leaves an argument out."""


def normal(*shape: int) -> Callable[[Context], Tensor]:
    """(batch, ...) of random numbers."""
    return lambda context: context.normal(context.batch, *shape)


def tiles(count: int) -> Callable[[Context], Tensor]:
    """(batch, tiles, channels, height, width)."""
    return lambda context: context.normal(context.batch, count, 3, *picture_size(context))


def picture(size: int) -> Callable[[Context], Tensor]:
    """(batch, channels, height, width) of a square picture."""
    return lambda context: context.normal(context.batch, 3, size, size)


def short_spectrogram(context: Context) -> Tensor:
    """(batch, frames, bins), with one frame for 320 samples."""
    return context.normal(context.batch, SAMPLES[context.size] // 320, bins(context))


def ones(*shape: int) -> Callable[[Context], Tensor]:
    """(batch, ...) of ones."""
    return lambda context: torch.ones(context.batch, *shape, dtype=torch.int64)


def patches(context: Context) -> Tensor:
    """(patches of all pictures, channels, height, width of a patch)."""
    rows, columns = grid(context)
    return context.normal(context.batch * rows * columns, 3, 4, 4)


def patches_in_a_row(context: Context) -> Tensor:
    """(1, channels, height of a patch, width of all patches of all pictures)."""
    rows, columns = grid(context)
    return context.normal(1, 3, 4, 4 * rows * columns * context.batch)


def shapes(context: Context) -> Tensor:
    """(pictures, 2): rows and columns of patches."""
    return torch.tensor([list(grid(context))] * context.batch)


def merged_patches(context: Context) -> Tensor:
    """(image tokens, height, width, channels) of two by two patches."""
    rows, columns = grid(context)
    return context.normal(context.batch * rows * columns // 4, 8, 8, 3)


def merged_grid(context: Context) -> Tensor:
    """(pictures, 3): frames, rows, columns of image tokens."""
    rows, columns = grid(context)
    return torch.tensor([[1, rows // 2, columns // 2]] * context.batch)


def all_patches(context: Context) -> Tensor:
    """(patches of all pictures, values of a patch)."""
    return flattened(context, frames=1)


def rows_of_patches(context: Context) -> Tensor:
    """(batch, patches, values of a patch)."""
    rows, columns = grid(context)
    return flattened(context, frames=1).reshape(context.batch, rows * columns, -1)


def mask_of_sound(context: Context) -> Tensor:
    """(batch, samples or frames): all of them are there."""
    name = "input_values" if context.wants("input_values") else "input_features"
    values = context.needed(name)
    return torch.ones(context.batch, values.shape[-1], dtype=torch.int64)


def prompt_with(count: int, *names: str) -> Callable[[Context], Tensor]:
    """(batch, tokens): text around so many placeholders."""
    return lambda context: with_placeholders(context, context.first(*names), count)


def span_of(count: int) -> Callable[[Context], Tensor]:
    """(batch, tokens): true at the placeholders that `prompt_with` puts behind the first tokens."""

    def mask(context: Context) -> Tensor:
        places = torch.arange(context.needed("input_ids").shape[1])
        return ((places >= BEFORE) & (places < BEFORE + count)).expand(context.batch, -1)

    return mask


def boxes(context: Context) -> Tensor:
    """(batch, tokens, 4): a box for every token."""
    corner = torch.arange(context.needed("input_ids").shape[1]).reshape(1, -1, 1)
    return (corner * torch.tensor([1, 2, 1, 2]) + torch.tensor([0, 0, 3, 3])).expand(context.batch, -1, -1) % 60


def four_codebooks(context: Context) -> Tensor:
    """(batch * 4, length)."""
    return context.tokens(12).repeat_interleave(4, dim=0)


def codes(channels: int, length: int = 12) -> Callable[[Context], Tensor]:
    """(batch, length, codebooks)."""
    return lambda context: context.tokens(length * channels).reshape(context.batch, length, channels) % 16 + 8


_QFORMER: Rules = {"qformer_input_ids": lambda context: context.tokens(6), "qformer_attention_mask": ones(6)}
_WAVE: Rules = {"input_values": wave_with_channel}

#: By one or several model types.
_RULES: dict[str, Rules] = {
    "audio-spectrogram-transformer": {"input_values": spectrogram},
    "omniasr omniasr_audio omniasr_ctc": _WAVE,
    "clap": {"input_features": normal(1, 64, 32)},
    "colmodernvbert modernvbert": {"pixel_values": tiles(1)},
    "dac higgs_audio_v2_tokenizer pe_audio pe_audio_encoder": _WAVE,
    "pe_audio_video pe_audio_video_encoder vibevoice_acoustic_tokenizer": _WAVE,
    "perception_lm": {"pixel_values": tiles(1)},
    "decision_transformer": {
        "states": lambda context: context.normal(context.batch, 8, context.config.state_dim),
        "actions": lambda context: context.normal(context.batch, 8, context.config.act_dim),
        "rewards": normal(8, 1),
        "returns_to_go": normal(8, 1),
        "timesteps": lambda context: torch.arange(8).expand(context.batch, -1),
        "attention_mask": ones(8),
    },
    "gemma4_audio": {"input_features": lambda context: context.normal(context.batch, FRAMES[context.size], 128)},
    "granite_docling": {"pixel_attention_mask": lambda context: torch.ones(context.batch, 1, dtype=torch.bool)},
    "idefics": {
        "pixel_values": tiles(1),
        "image_attention_mask": lambda context: torch.ones_like(context.needed("input_ids")).unsqueeze(-1),
    },
    "instructblip": _QFORMER,
    "instructblipvideo": _QFORMER | {"pixel_values": tiles(4)},
    "kimi_k25 kimi_k25_vision paddleocr_vl": {"pixel_values": patches},
    "lightglue superglue efficientloftr": {"pixel_values": tiles(2)},
    "llava": {"image_sizes": absent},
    "mllama": {
        "pixel_values": lambda context: context.normal(context.batch, 1, 4, 3, *picture_size(context)),
        "aspect_ratio_ids": lambda context: torch.full((context.batch, 1), 6),
        "aspect_ratio_mask": ones(1, 4),
        "cross_attention_mask": lambda context: torch.ones(*context.needed("input_ids").shape, 1, 4, dtype=torch.int64),
    },
    "neucodec xcodec2": _WAVE | {"input_features": short_spectrogram},
    "pop2piano": {"input_ids": absent, "input_features": normal(16, 64)},
    "speech-encoder-decoder": {"input_features": absent},
    "speech_to_text": {"input_features": frames_first},
    "xclip": {"pixel_values": lambda context: context.normal(context.batch, 8, 3, *picture_size(context))},
    "xcodec": _WAVE,
    "voxtral_realtime_text": {"t_cond": lambda context: context.normal(1, 64)},
    "colqwen2": {"pixel_values": rows_of_patches, "input_ids": prompt_with(8, "image_token_id")},
    "fuyu": {"pixel_values": rows_of_patches, "image_patches": absent},
    "neomme": {"pixel_values": all_patches},
    "granite_speech granite_speech_plus": {"input_features_mask": absent},
    "moss_transcribe_diarize": {"padding_mask": mask_of_sound},
    "vibevoice": _WAVE | {"padding_mask": mask_of_sound},
    "musicgen": {"decoder_input_ids": four_codebooks},
    "musicgen_melody": {
        "input_features": absent,
        "decoder_input_ids": four_codebooks,
    },
    "dia": {"decoder_input_ids": codes(9)},
    "kyutai_speech_to_text": {"input_ids": codes(33), "input_values": absent, "attention_mask": absent},
    "csm": {"input_values": absent, "input_ids": codes(32), "attention_mask": ones(12)},
    "mimi_decoder pocket_tts_audio_tokenizer_decoder": {"latents": normal(64, 12)},
    "blip_2_qformer": {"encoder_hidden_states": normal(9, 64), "query_embeds": normal(16, 64)},
    "nemotron3_5_transcribe_word_timestamp": {"inputs_embeds": normal(16, 64)},
    "oneformer": {"task_inputs": lambda context: context.tokens(77)},
    "kosmos-2": {
        "input_ids": lambda context: with_placeholders(context, BEFORE, 16),
        "image_embeds_position_mask": span_of(16),
    },
    "seggpt": {"pixel_values": picture(16), "prompt_pixel_values": picture(16), "prompt_masks": picture(16)},
    "inkling_mm_model": {"pixel_values": normal(2, 4, 4, 3)},
    "bros udop": {"bbox": lambda context: boxes(context).float() / 64},
    "lilt layoutlm layoutlmv3": {"bbox": boxes},
    "clvp": {"input_features": lambda context: context.normal(context.batch, 80, FRAMES[context.size])},
    "fun_asr_nano_encoder fun_asr_nano": {"input_features_mask": ones(63), "input_features": normal(63, 224)},
    "gemma4_unified": {
        "image_position_ids": lambda context: torch.cartesian_prod(torch.arange(4), torch.arange(2)).expand(
            context.batch, -1, -1
        ),
        "pixel_values": lambda context: context.normal(context.batch, 8, 192).sigmoid(),
    },
    "glm_image": {
        "input_ids": prompt_with(32, "image_token_id"),
        "images_per_sample": lambda context: torch.full((context.batch,), 2),
        "image_grid_thw": lambda context: torch.tensor([[1, *grid(context)]] * 2 * context.batch),
    },
    "inkling2 inkling2_loop inkling2_vision": {"pixel_values": merged_patches, "image_grid_thw": merged_grid},
    "lxmert": {
        "visual_feats": normal(6, 2048),
        "visual_pos": lambda context: context.normal(context.batch, 6, 4).sigmoid(),
    },
    "minicpm_ocr_vision minicpmv4_7_vision": {"pixel_values": patches_in_a_row, "target_sizes": shapes},
    "nemotron_h_omni": {"pixel_values": all_patches, "image_grid_hw": shapes},
    "nemotron3_5_asr": {"prompt_ids": lambda context: torch.zeros(context.batch, dtype=torch.int64)},
    "omdet-turbo": {
        "pixel_values": picture(64),
        "classes_input_ids": lambda context: context.tokens(5, 6),
        "classes_attention_mask": lambda context: torch.ones(6, 5, dtype=torch.int64),
        "tasks_input_ids": lambda context: context.tokens(5),
        "tasks_attention_mask": ones(5),
        "classes_structure": lambda context: torch.tensor([3, 3]),
    },
    "visual_bert": {
        "visual_embeds": lambda context: context.normal(context.batch, 4, context.config.visual_embedding_dim),
        "visual_attention_mask": ones(4),
        "visual_token_type_ids": ones(4),
    },
    "tvp": {
        "pixel_values": lambda context: context.normal(1, 2, 3, 64, 64),
        "input_ids": lambda context: context.tokens(12, 1),
    },
    "musicflamingo": {"input_ids": prompt_with(32, "audio_token_id")},
    "qwen2_audio": {"input_ids": prompt_with(32, "audio_token_id", "audio_token_index")},
    "qwen3_asr qwen3_asr_encoder": {"input_features": normal(32, 200), "input_features_mask": ones(200)},
    "depth_pro": {"pixel_values": picture(64)},
    "granite_speech5_ctc granite_speech5_encoder": {"input_features": normal(96, 32)},
    "muse_glimmer_assistant": {
        "noise_embeds": normal(4, 64),
        "context_hidden_states": lambda context: context.normal(
            context.batch, 6, 64 * len(context.config.target_layer_ids)
        ),
    },
    "pi0": {
        "pixel_attention_mask": lambda context: torch.ones(context.batch, 1, dtype=torch.bool),
        "state": lambda context: context.normal(context.batch, context.config.max_state_dim),
        "input_ids": prompt_with(16, "image_token_id", "image_token_index"),
    },
    "molmo2": {
        "pixel_values": lambda context: context.normal(2, 16, 48),
        "image_token_pooling": lambda context: torch.arange(32).reshape(8, 4),
        "image_grids": lambda context: torch.tensor([[2, 2, 0, 0]] * 2),
        "image_num_crops": lambda context: torch.tensor([1, 1]),
    },
    "jev": {
        "input_ids": lambda context: context.tokens(12, 1),
        "marks": lambda context: torch.tensor([[6, 10]]),
        "num_options": lambda context: torch.tensor([[2, 2]]),
        "question_type_ids": lambda context: torch.tensor([[0, 0]]),
    },
    "granite4_vision": {"input_ids": prompt_with(14, "image_token_id", "image_token_index")},
}
RULES = {model_type: rules for types, rules in _RULES.items() for model_type in types.split()}
