"""The arguments of short runs of architectures that need more than tokens, an image or features of the usual shape.

They are fixed numbers: the random generator of the caller is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Rows and columns of patches. All spatial merges divide it.
SIDE = 4
#: Frames of a spectrogram and samples of a wave, enough for 16 tokens after the usual convolutions.
FRAMES = 128
SAMPLES = 6480


def numbers(*shape: int) -> Tensor:
    """Normally distributed numbers, the same in every call."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def words(count: int) -> Tensor:
    """`(1, count)`: ids of tokens."""
    return torch.arange(5, 5 + count).unsqueeze(0)


def _codes(tokens: int, streams: int) -> Tensor:
    """`(1, tokens, streams)`: a code of each stream for every token."""
    return (torch.arange(tokens).unsqueeze(1) + torch.arange(streams)).unsqueeze(0) % 16


def sides(size: Any) -> tuple[int, int]:
    """Rows and columns, from a number for both, or a sequence that ends with them."""
    return (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))


def _cut_patches(*shape: int) -> dict[str, Tensor]:
    """An image that was already cut into patches of the given shape."""
    return {"pixel_values": numbers(*shape), "grid_thw": torch.tensor([[1, SIDE, SIDE]])}


def _image_and_prompt(module: Any, tokens: int) -> dict[str, Any]:
    """An image, another one, and the segmentation of the latter."""
    height, width = sides(module.config.image_size)
    # The image size in the config covers both images, one above the other.
    image = numbers(1, module.config.num_channels, height // 2, width)
    return {"pixel_values": image, "prompt_pixel_values": image.flip(3), "prompt_masks": image.flip(2)}


def patches_in_a_strip(module: Any, tokens: int) -> dict[str, Any]:
    """All patches of an image side by side in one strip."""
    size = module.config.patch_size
    return {
        "pixel_values": numbers(1, module.config.num_channels, size, size * SIDE**2),
        "target_sizes": torch.tensor([[SIDE, SIDE]]),
    }


def words_on_a_page(module: Any, tokens: int) -> dict[str, Any]:
    """Words in one box, and the same words for a decoder."""
    given: dict[str, Any] = {"input_ids": words(tokens)}
    if module.config.is_encoder_decoder:
        given["decoder_input_ids"] = words(tokens)
    if not module.config.is_decoder:
        given["bbox"] = torch.tensor([0.1, 0.1, 0.2, 0.2]).expand(1, tokens, 4)
    return given


def encoded_series(module: Any, tokens: int) -> dict[str, Any]:
    """Steps of a series with their features, and what an encoder has made of others, for a decoder."""
    config = module.config
    return {
        "inputs_embeds": numbers(1, tokens, config.feature_size),
        "encoder_hidden_states": numbers(1, tokens, config.d_model),
    }


def wave_and_spectrogram(module: Any, tokens: int) -> dict[str, Any]:
    """A wave and its spectrogram."""
    bins = module.config.semantic_model_config.feature_projection_input_dim
    return {"input_values": numbers(1, 1, SAMPLES), "input_features": numbers(1, SAMPLES // 320, bins)}


def _spectrogram_of_clap(module: Any, tokens: int) -> dict[str, Any]:
    """A spectrogram, `(batch, views, frames, bins)`. With fusion, there are views of parts of a longer one."""
    size, bins, fused = module.config.spec_size, module.config.num_mel_bins, module.config.enable_fusion
    given = {"input_features": numbers(1, 4 if fused else 1, size * (size // bins), bins)}
    return given | {"is_longer": torch.tensor([[False]])} if fused else given


def _frames_of_a_video(module: Any, tokens: int) -> dict[str, Any]:
    """Frames of the size that a vision tower of timm accepts, and their sound."""
    size = next(part.img_size for part in module.modules() if getattr(part, "img_size", None))
    given = {"pixel_values_videos": numbers(1, 8, 3, *sides(size))}
    return given | {"input_values": numbers(1, 1, SAMPLES)} if hasattr(module.config, "audio_config") else given


#: The `example_inputs` of declarations, by the model types that they are for.
EXAMPLES: dict[tuple[str, ...], Callable[[Any, int], dict[str, Any]]] = {
    # A text with cross-attention to the features of one image.
    ("idefics",): lambda module, tokens: {
        "input_ids": words(tokens),
        "image_encoder_embeddings": numbers(1, 1, SIDE, module.config.vision_config.embed_dim),
        "image_attention_mask": torch.ones(1, tokens, 1, dtype=torch.int64),
    },
    # Two bytes in each patch.
    ("blt_local_encoder",): lambda module, tokens: {
        "input_ids": words(tokens),
        "num_patches": -(-tokens // 2),
        "patch_ids": torch.arange(tokens).unsqueeze(0) // 2,
    },
    ("blt_local_decoder",): lambda module, tokens: {
        "inputs_embeds": numbers(1, tokens, module.config.hidden_size),
        "patch_embeds": numbers(1, tokens, module.config.hidden_size_global),
    },
    ("blt_global_transformer",): lambda module, tokens: {
        "inputs_embeds": numbers(
            1, tokens, getattr(module.token_embedding_projection, "in_features", module.config.hidden_size)
        )
    },
    ("xclip",): lambda module, tokens: {
        "input_ids": words(tokens),
        "pixel_values": numbers(
            1, module.config.vision_config.num_frames, 3, *sides(module.config.vision_config.image_size)
        ),
    },
    # A prompt with one question and two options.
    ("jev",): lambda module, tokens: {
        "input_ids": words(tokens),
        "marks": torch.tensor([[tokens]]),
        "num_options": torch.tensor([[2]]),
        "question_type_ids": torch.tensor([[0]]),
    },
    ("seggpt",): _image_and_prompt,
    ("clap_audio_model",): _spectrogram_of_clap,
    # Frames instead of a batch of images.
    ("xclip_vision_model",): lambda module, tokens: {
        "pixel_values": numbers(module.config.num_frames, module.config.num_channels, *sides(module.config.image_size))
    },
    ("videomt",): lambda module, tokens: {
        "pixel_values_videos": numbers(1, 2, module.config.num_channels, *sides(module.config.image_size))
    },
    # The pixels of every patch, as a separate image.
    ("kimi_k25_vision",): lambda module, tokens: _cut_patches(SIDE**2, 3, *sides(module.config.patch_size)),
    # Patches of a batch.
    ("paddleocr_vl_vision",): lambda module, tokens: _cut_patches(
        1, SIDE**2, module.config.num_channels, *sides(module.config.patch_size)
    ),
    # The pixels of every patch and of its frames in one row.
    ("muse_glimmer_vision", "muse_spark_vision"): lambda module, tokens: _cut_patches(
        SIDE**2, module.config.patch_temporal * 3 * module.config.patch_size**2
    ),
    # The patches of a crop, cut out and flattened.
    ("molmo2_vision",): lambda module, tokens: {
        "pixel_values": numbers(
            1, module.config.num_position_embeddings, module.config.num_channels * module.config.patch_size**2
        )
    },
    # Two by two patches in one, counted in such groups.
    ("inkling2_vision",): lambda module, tokens: {
        "pixel_values": numbers(
            SIDE**2, *[module.config.patch_size * module.config.spatial_merge_size] * 2, module.config.num_channels
        ),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
    },
    ("bridgetower_vision_model",): lambda module, tokens: {"image": numbers(1, 3, *sides(module.config.image_size))},
    # The features of another encoder on a grid.
    ("unlimited_ocr_vision_encoder",): lambda module, tokens: {
        "patch_embeds": numbers(
            1, module.config.hidden_size, *[module.config.image_size // module.config.patch_size] * 2
        )
    },
    # Features of patches, without the queries that follow them.
    ("deepseek_ocr2_encoder",): lambda module, tokens: {
        "inputs_embeds": numbers(1, tokens, module.config.hidden_size),
        "num_patches": tokens,
    },
    ("csm",): lambda module, tokens: {"input_ids": _codes(tokens, module.config.num_codebooks)},
    # A word precedes the codes.
    ("kyutai_speech_to_text",): lambda module, tokens: {"input_ids": _codes(tokens, module.config.num_codebooks + 1)},
    # A text for the encoder, and one code of each channel for the decoder.
    ("dia",): lambda module, tokens: {
        "input_ids": words(tokens),
        "decoder_input_ids": _codes(tokens, module.config.decoder_config.num_channels),
    },
    # An embedding of the delay of the transcript.
    ("voxtral_realtime_text",): lambda module, tokens: {
        "input_ids": words(tokens),
        "t_cond": numbers(1, module.config.hidden_size),
    },
    ("pe_video_encoder", "pe_audio_video_encoder"): _frames_of_a_video,
    ("pe_audio_encoder", "omniasr_audio"): lambda module, tokens: {"input_values": numbers(1, 1, SAMPLES)},
    ("voxtral_realtime_encoder",): lambda module, tokens: {
        "input_features": numbers(1, module.config.num_mel_bins, FRAMES)
    },
}
